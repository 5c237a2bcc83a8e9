"""`hostring top`: the page's figures in a terminal."""

from __future__ import annotations

from pathlib import Path

import pytest
from serving_ranks import ask, served
from typer.testing import CliRunner

from hostring.commands.cli import app
from hostring.commands.top import _bar
from hostring.integrations.llm.serve import scheduler

KEY = "a-key-for-top"


def top(*args: str) -> tuple[int, str, str]:
    found = CliRunner().invoke(app, ["top", *args], env={"COLUMNS": "200"})
    return found.exit_code, found.output, str(found.exception or "")


def test_one_table_has_every_rank_and_event(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scheduler, "REPORT_S", 0.05)
    keys = tmp_path / "keys"
    keys.write_text(f"# of the server\n{KEY}\n", encoding="utf-8")
    with served(("float32", "bfloat16"), api_keys=(KEY,)) as server:
        body = {"prompt": "In the beginning", "max_tokens": 200, "ignore_eos": True}
        assert ask(f"{server.url}/v1/completions", body, Authorization=f"Bearer {KEY}")[0] == 200
        code, out, _ = top(server.url, "--api-key-file", str(keys), "--once")
        assert code == 0
        assert "all 2 ranks are here" in out
        rows = [line.split() for line in out.splitlines() if "cpu" in line]
        assert [(row[0], row[3]) for row in rows] == [("0", "float32"), ("1", "bfloat16")]
        assert "200 tokens generated" in out
        assert "all 2 ranks are together" in out
        assert "wants a key: give --api-key-file" in top(server.url, "--once")[2]
    assert "no server answers at http://127.0.0.1:1" in top("127.0.0.1:1", "--once")[2]
    assert "there is no such file" in top("--api-key-file", str(tmp_path / "none"), "--once")[2]


def test_a_bar_is_as_long_as_the_time_it_stands_for() -> None:
    assert _bar({"compute": 0.5, "wait": 0.25, "rest": 0.25}) == "C" * 12 + "W" * 6 + "·" * 6
    assert _bar({"compute": 0.01, "rest": 0.99}) == "·" * 24
