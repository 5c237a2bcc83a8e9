"""`hostring plan model --context` and `hostring plan map`: what other ways to divide a model would cost."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from model_headers import sparse_gguf
from typer.testing import CliRunner

from hostring.commands.cli import app
from hostring.integrations.llm.planning.ask import asked_for, described
from hostring.integrations.llm.planning.prices import Way, lines, ways

RATE_GB, GFLOP = 10.0, 100.0


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return sparse_gguf(tmp_path_factory.mktemp("ways") / "m.gguf", layers=12, hidden=1024, columns=4096, heads=16)


def priced(
    model: Path, tmp_path: Path, *ranks: dict[str, Any], context: int = 1, phase: Any = "decode", us: float = 20.0
) -> tuple[dict[str, Way], str]:
    """The ways by name, and what is said."""
    file = tmp_path / "ranks.json"
    rows = [{"decode_gb_per_s": RATE_GB, "prefill_gflop_per_s": GFLOP, "compute": "exact", **rank} for rank in ranks]
    file.write_text(json.dumps({"ranks": rows}), encoding="utf-8")
    asked = asked_for(described(model, file), phase, context, collective_us=us, link_price=lambda *_: 0.0)
    found = ways(asked)
    return {way.name: way for way in found}, "\n".join(lines(asked, found))


def test_one_token_costs_each_way_what_arithmetic_says(model: Path, tmp_path: Path) -> None:
    """Weights at 10 GB/s, 2 sums per layer, half a sum per boundary, one decision."""
    found, _ = priced(model, tmp_path, *[{"name": f"r{n}"} for n in range(4)])
    header = described(model, 1).model
    parts = (header.attention_in, header.attention_out, header.mlp_in, header.mlp_out)
    layers, head = (4 * sum(part.elements for part in these) / 1e10 for these in (parts, [header.head]))
    assert found["one node"].seconds == pytest.approx(layers + head, rel=0.02)
    assert found["tp=4"].seconds == pytest.approx((layers + head) / 4 + 25 * 20e-6, rel=0.05)
    assert found["pp=2"].seconds == pytest.approx(layers + head + 10e-6 + 20e-6, rel=0.02)
    assert found["pp=2,tp=2"].seconds == pytest.approx((layers + head) / 2 + 24 * 20e-6 + 30e-6, rel=0.05)


def test_a_pipeline_gains_with_several_texts_alone(model: Path, tmp_path: Path) -> None:
    found, said = priced(model, tmp_path, {"name": "a"}, {"name": "b"})
    two, one = found["pp=2"], found["one node"]
    assert two.seconds > one.seconds
    assert two.pace_s < 0.6 * one.pace_s
    assert sum(two.layers) == 12
    assert "predicted" in said


def test_slow_links_make_one_node_the_fastest(model: Path, tmp_path: Path) -> None:
    _, said = priced(model, tmp_path, {"name": "a"}, {"name": "b"}, us=50_000.0)
    assert "fastest: one node" in said
    _, said = priced(model, tmp_path, {"name": "a"}, {"name": "b"}, us=1.0)
    assert "fastest: tp=2" in said


def test_a_slow_rank_is_left_out_by_name(model: Path, tmp_path: Path) -> None:
    _, said = priced(model, tmp_path, {"name": "desk"}, {"name": "pi", "decode_gb_per_s": 0.1}, us=200.0)
    assert "left out of it: rank 1 (pi)" in said


def test_a_model_that_fits_no_node_is_cut_into_stages_that_fit(model: Path, tmp_path: Path) -> None:
    """Tensor parallelism would be slower: a sum takes 5 ms."""
    memory = [{"memory_gb": 0.5}, {"memory_gb": 0.5}]
    found, said = priced(model, tmp_path, *memory, us=5000.0)
    assert "doesn't fit" in found["one node"].why_not
    assert "fastest: pp=2" in said


def test_a_long_context_costs_the_reading_of_its_keys_and_values(model: Path, tmp_path: Path) -> None:
    short, _ = priced(model, tmp_path, {"name": "a"}, context=1)
    long, _ = priced(model, tmp_path, {"name": "a"}, context=4001)
    keys_and_values = 2 * 4 * 4000 * 12 * 4 * 64
    extra = long["one node"].seconds - short["one node"].seconds
    assert extra == pytest.approx(keys_and_values / 1e10, rel=0.05)


def test_a_prompt_passes_stages_in_chunks(model: Path, tmp_path: Path) -> None:
    ranks = [{"name": f"r{n}"} for n in range(2)]
    found, said = priced(model, tmp_path, *ranks, context=1280, phase="prefill")
    assert found["one node"].seconds / found["pp=2"].seconds == pytest.approx(2 * 10 / 11, rel=0.1)
    assert "the prompt takes predicted" in said


def test_speeds_that_nobody_knows_are_refused(model: Path) -> None:
    with pytest.raises(ValueError, match=r"needs the speed of rank 0 in decode: give --ranks FILE with decode_gb"):
        asked_for(described(model, 2), "decode", 100, collective_us=None, link_price=lambda *_: 0.0)


def test_the_commands_print_a_map_and_write_a_plot(model: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    ranks, plot, prices = tmp_path / "ranks.json", tmp_path / "map.svg", tmp_path / "map.json"
    rows = [{"name": f"r{n}", "decode_gb_per_s": RATE_GB, "compute": "exact"} for n in range(3)]
    ranks.write_text(json.dumps({"ranks": rows, "collective_us": 30}), encoding="utf-8")
    done = CliRunner().invoke(app, ["plan", "model", str(model), "--ranks", str(ranks), "--context", "2000"])
    assert done.exit_code == 0, done.output
    assert "decode at 2,000 positions" in done.output
    words = ["plan", "map", str(model), "--ranks", str(ranks), "--contexts", "100,3000", "--json", str(prices)]
    done = CliRunner().invoke(app, [*words, "--plot", str(plot)])
    assert done.exit_code == 0, done.output
    assert "every figure is predicted" in done.output
    assert "predicted" in plot.read_text(encoding="utf-8")
    cells = json.loads(prices.read_text(encoding="utf-8"))["cells"]
    assert {(c["context"], c["ranks"], c["gbit_per_s"]) for c in cells} == {
        (context, n, rate) for context in (100, 3000) for n in (1, 2, 3) for rate in (1.0, 10.0)
    }
