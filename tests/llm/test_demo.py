"""The demo on the bundled model: what it claims, counted; and that it can tell a run that is not what it claims."""

from __future__ import annotations

import copy
import json
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from hostring.integrations.llm.demo.job import BUNDLED, Job, make_job
from hostring.integrations.llm.demo.verdict import faults, prompt_statement, statement

LAYERS, HIDDEN = (
    json.loads((BUNDLED / "config.json").read_text(encoding="utf-8"))[k] for k in ("num_hidden_layers", "hidden_size")
)


def run_demo(tmp_path: Path, *args: str) -> tuple[dict[str, Any], str]:
    file = tmp_path / "out.json"
    command = [sys.executable, "-m", "hostring", "demo", "--json", str(file), *args]
    done = subprocess.run(command, capture_output=True, text=True, timeout=110)
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(file.read_text(encoding="utf-8")), done.stdout


def check_account(result: dict[str, Any], topology: str = "mesh") -> None:
    """What every valid run must show, with the traffic of the mesh derived here from nothing but the shapes."""
    ranks = result["ranks"]
    assert result["faults"] == []
    assert len(result["activation_sha256"]) == ranks
    assert len(set(result["activation_sha256"])) == 1
    assert re.fullmatch("[0-9a-f]{64}", result["activation_sha256"][0])
    assert result["collectives_per_token"] == result["expected_collectives_per_token"] == 2 * LAYERS + 1
    assert result["bytes_per_token"] == result["expected_bytes_per_token"]
    assert result["prefill_bytes"] == result["expected_prefill_bytes"]
    for report in result["per_rank"]:
        assert report["prefill_collectives"] == 2 * LAYERS + 1
        assert report["wrong_steps"] == 0
    if topology == "mesh":
        candidates = 2 * 4 * (1 if result["temperature"] == 0 else 40)  # a value and an id of 4 bytes each
        reduced = 2 * LAYERS * ranks * (ranks - 1) * 4 * HIDDEN
        decided = (ranks - 1) * (candidates + 8)  # to the head, and the token and how many there are back
        assert result["bytes_per_token"] == reduced + decided
    for name in ("decode_tokens_per_s", "ttft_s", "prefill_tokens_per_s"):
        assert result[name] > 0


def test_two_unlike_ranks_by_default_with_both_controls(tmp_path: Path) -> None:
    result, shown = run_demo(tmp_path, "--max-tokens", "24")
    check_account(result)
    assert (result["ranks"], result["dtypes"], len(result["tokens"])) == (2, ["float16", "bfloat16"], 24)
    alone, same = result["controls"]["one_rank"], result["controls"]["same_dtype"]
    assert [(c["rank"], c["dtype"], len(c["tokens"])) for c in alone] == [(0, "float16", 24), (1, "bfloat16", 24)]
    assert all(c["decode_tokens_per_s"] > 0 for c in [*alone, same])
    assert (same["dtype"], same["is_the_run_itself"]) == ("float16", False)
    assert len(set(same["activation_sha256"])) == 1
    assert same["activation_sha256"] != result["activation_sha256"]  # other dtypes compute other activations
    assert result["text"] in shown
    assert result["activation_sha256"][0] in shown
    assert result["statement"] in shown
    for phase in ("compute", "stage", "wait", "transfer", "fold", "rest"):
        assert all(report["seconds"][phase] >= 0 for report in result["per_rank"])
        assert phase in shown


@pytest.mark.parametrize(
    ("ranks", "topology"),
    [
        (3, "tree"),
        *(pytest.param(n, name, marks=pytest.mark.slow) for n, name in ((2, "ring"), (3, "mesh"), (3, "star"))),
    ],
)
def test_float32_ranks_write_what_one_rank_writes(tmp_path: Path, ranks: int, topology: str) -> None:
    args = ("--ranks", str(ranks), "--topology", topology, "--dtypes", "float32", "--temperature", "0")
    result, _ = run_demo(tmp_path, *args, "--max-tokens", "40", "--prompt", "And God said unto them,")
    check_account(result, topology)
    (alone,) = result["controls"]["one_rank"]
    assert len(result["tokens"]) == 40
    assert alone["tokens"] == result["tokens"]
    assert alone["tokens_in_common"] == 40
    assert result["controls"]["same_dtype"]["is_the_run_itself"]


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (("--ranks", "99"), "99 ranks can't share 10 query heads"),
        (("--json", "{}/none/x.json"), "there is no directory"),
        (("--topology", "cube"), "topology='cube' is unknown"),
        (("--prompt", ""), "a prompt is empty"),
        (("--top-p", "7"), "Invalid value for '--top-p'"),
        (("--timeout", "-5"), "Invalid value for '--timeout'"),
    ],
)
def test_mistakes_are_told_before_a_rank_is_started(tmp_path: Path, args: tuple[str, ...], words: str) -> None:
    command = [sys.executable, "-m", "hostring", "demo", *(arg.format(tmp_path) for arg in args)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert words in done.stderr
    assert "ready" not in done.stdout + done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.faults
def test_an_interrupted_demo_ends_as_one() -> None:
    command = [sys.executable, "-m", "hostring", "demo", "--chat", "--no-controls"]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as demo:
        assert demo.stdout is not None
        until = time.monotonic() + 60
        while "ready" not in demo.stdout.readline() and time.monotonic() < until:
            assert demo.poll() is None
        demo.send_signal(signal.SIGINT)
        demo.wait(timeout=30)  # its input stays open until then: the end of it would end the chat as well
        _, said = demo.communicate(timeout=30)
    assert demo.returncode == 130, said
    assert "Traceback" not in said


def test_the_order_of_the_environment_is_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOSTRING_ORDER", "ring")
    result, _ = run_demo(tmp_path, "--ranks", "2", "--topology", "ring", "--max-tokens", "4", "--no-controls")
    assert result["order"] == "ring"
    assert len(set(result["activation_sha256"])) == 1


def test_generate_does_the_same_in_a_launched_group(tmp_path: Path) -> None:
    file = tmp_path / "out.json"
    args = ("--dtypes", "f16,bf16,f16", "--max-tokens", "16", "--json", str(file))
    command = [sys.executable, "-m", "hostring", "launch", "-n", "3", "-m", "hostring", "generate", *args]
    done = subprocess.run(command, capture_output=True, text=True, timeout=110)
    assert done.returncode == 0, done.stderr
    result = json.loads(file.read_text(encoding="utf-8"))
    check_account(result)
    assert result["dtypes"] == ["float16", "bfloat16", "float16"]
    assert done.stdout.count(result["text"]) == 1  # only the head prints
    assert result["controls"] == {}


def test_generate_runs_without_a_launcher_and_without_the_compiler() -> None:
    args = ("--max-tokens", "8", "--no-stats", "--prompt", "In the beginning")
    command = [sys.executable, "-X", "importtime", "-m", "hostring", "generate", *args]
    done = subprocess.run(command, capture_output=True, text=True, timeout=110)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("In the beginning")
    assert len(done.stdout) > len("In the beginning") + 8
    assert "torch.nn" in done.stderr
    assert "torch._dynamo" not in done.stderr  # it takes seconds, and nothing is compiled here


def test_a_model_that_ranks_cant_load_ends_the_demo_with_the_reason(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "mamba"}', encoding="utf-8")
    command = [sys.executable, "-m", "hostring", "demo", "--ranks", "1", "--model", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=110)
    assert done.returncode == 1
    assert "hostring: rank" in done.stderr
    assert "has 0 .safetensors files" in done.stderr
    assert "exited with code 1" in done.stderr


RUN: dict[str, Any] = {
    "ranks": 2,
    "decode_tokens_per_s": 100.0,
    "activation_sha256": ["aa", "aa"],
    "per_rank": [
        {
            "rank": r, "collectives_per_token": 9.0, "expected_collectives_per_token": 9, "bytes_per_token": 5128.0,
            "expected_bytes_per_token": 5128, "prefill_collectives": 9, "expected_prefill_collectives": 9,
            "prefill_bytes": 9000, "expected_prefill_bytes": 9000, "wrong_steps": 0,
            "seconds": {"compute": 0.25, "wait": 0.75},
        }
        for r in range(2)
    ],
    "controls": {
        "one_rank": [{"dtype": "float16", "decode_tokens_per_s": 200.0}],
        "same_dtype": {"activation_sha256": ["bb", "bb"]},
    },
}  # fmt: skip


def test_a_run_that_is_not_what_it_claims_is_named() -> None:
    assert faults(RUN) == []
    bad = copy.deepcopy(RUN)
    bad["per_rank"][1]["bytes_per_token"] = 5000.5
    bad["per_rank"][0] |= {"prefill_collectives": 1, "prefill_bytes": 8, "wrong_steps": 3}
    bad["activation_sha256"][1] = "ab"
    bad["controls"]["same_dtype"]["activation_sha256"][1] = "bc"
    assert faults(bad) == [
        "rank 0: 1 collectives over the prompt counted, 9 expected",
        "rank 0: 8 bytes over the prompt counted, 9000 expected",
        "rank 0: 3 steps computed with something else than what was reduced",
        "rank 1: 5000.5 bytes per token counted, 5128 expected",
        "this run: rank 1 has reduced other activations than rank 0",
        "the same-dtype control: rank 1 has reduced other activations than rank 0",
    ]


def test_the_statement_says_who_wins() -> None:
    assert "loses here, it is 0.50 times as fast. At least 75 % of the time" in statement(RUN)
    assert "wins here, it is 1.50 times as fast" in statement({**RUN, "decode_tokens_per_s": 300.0})
    assert "neither" in statement({**RUN, "decode_tokens_per_s": 201.0})
    assert statement({**RUN, "controls": {}}) == ""


def test_a_prompt_that_another_rank_reads_is_judged_by_the_first_token() -> None:
    runs = [{"rank": 0, "ttft_s": 0.1}, {"rank": 1, "ttft_s": 0.6}]
    result = {"ttft_s": 0.3, "controls": {"one_rank": runs}}
    won = prompt_statement(result, "prefill there", [1])
    assert (
        won == "first token after 300.0 ms, of rank 1 alone 600.0: prefill there wins here, it is 2.00 times as fast."
    )
    assert "loses here, it is 0.33 times as fast" in prompt_statement(result, "prefill there", [0, 1])
    assert "neither" in prompt_statement({**result, "ttft_s": 0.59}, "prefill there", [1])
    assert prompt_statement({**result, "controls": {}}, "prefill there", [1]) == ""


COMMON: dict[str, Any] = {
    "prompts": (),
    "max_tokens": 8,
    "temperature": 0.0,
    "top_k": 0,
    "top_p": 1.0,
    "seed": 0,
    "controls": True,
}


@pytest.mark.parametrize(
    ("ranks", "dtypes", "expected"),
    [
        (None, None, ("float16", "bfloat16")),
        (3, None, ("float16", "bfloat16", "float16")),
        (None, "f32, bf16 ,float16", ("float32", "bfloat16", "float16")),
        (4, "f32", ("float32",) * 4),
        (None, "f32", ("float32",) * 2),
    ],
)
def test_a_job_completes_what_was_not_said_and_survives_json(
    ranks: int | None, dtypes: str | None, expected: tuple[str, ...]
) -> None:
    job = make_job(model=None, ranks=ranks, dtypes=dtypes, **COMMON)
    assert job.dtypes == expected
    assert job.ranks == len(expected)
    assert Path(job.model) == BUNDLED.absolute()
    assert Job.from_json(job.to_json()) == job
