"""Two recorded runs are compared stage by stage: a wrong dtype and bypassed reductions are named by layer and
operation."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from llm_models import byte_tokenizer, packable_model, write_gguf
from ranks import in_threads
from typer.testing import CliRunner

import hostring
from hostring.commands.cli import app
from hostring.integrations.llm import load_model
from hostring.integrations.llm.generate import Model
from hostring.integrations.llm.model.tensor_parallel import HiddenReducer
from hostring.integrations.llm.xray.comparison import Run, differences, first_beyond, other_weights
from hostring.integrations.llm.xray.recording import Recording

IDS = [5, 17, 3, 250, 9, 9, 101, 42, 7, 311, 12]
LAYERS = 2


@pytest.fixture(scope="module")
def model_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("xray")
    return write_gguf(packable_model("qwen3", 3, 64), folder / "m.gguf", Kind.Q8_0, byte_tokenizer(400))


def record(
    model_file: Path, file: Path, ranks: int = 2, change: Callable[[Model], None] = lambda model: None, **options: Any
) -> Run:
    def body(comm: hostring.Comm) -> None:
        model = load_model(model_file, comm, max_seq=64, hash_activations=True, **{"compute": "exact", **options})
        change(model)
        recording = Recording(model)
        found = model.generate(IDS, max_tokens=5)
        recording.write(file, found, prompt=IDS)

    in_threads(ranks, body)
    return Run.read(file)


def test_what_is_recorded_is_counted_once(model_file: Path) -> None:
    def body(comm: hostring.Comm) -> tuple[dict[str, int], dict[str, int]]:
        model = load_model(model_file, comm, max_seq=64, hash_activations=True, compute="exact")
        Recording(model)
        model.generate(IDS, max_tokens=2)
        return model.sharded.counts()["calls"], comm.counters.snapshot()["calls"]

    for counted, once in in_threads(2, body):
        assert counted == once


@pytest.fixture(scope="module")
def honest(model_file: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    return record(model_file, tmp_path_factory.mktemp("honest") / "a.npz")


def where(a: Run, b: Run, tolerance: float = 0.0) -> tuple[int, int | None, str] | None:
    found = first_beyond(differences(a, b), tolerance)
    return found and (found.stage.step, found.stage.layer, found.stage.operation)


@pytest.mark.parametrize("compute", ["exact", "packed"])
def test_the_same_run_twice_has_the_same_bits_in_every_stage(compute: str, model_file: Path, tmp_path: Path) -> None:
    a, b = (record(model_file, tmp_path / f"{n}.npz", compute=compute) for n in "ab")
    found = differences(a, b)
    assert len(found) == 5 * (2 * LAYERS + 3)  # the embedding, the stream at the end, logits
    assert where(a, b) is None
    assert a.faults() == []
    assert all(d.top1 and d.top16 == 16 and d.cosine == pytest.approx(1) for d in found)


def test_packed_runs_of_other_numbers_of_ranks_have_the_same_bits(model_file: Path, tmp_path: Path) -> None:
    """Sums are compared after the tree over units is complete."""
    a, b = (record(model_file, tmp_path / f"{n}.npz", n, compute="packed") for n in (1, 3))
    assert where(a, b) is None


def test_exact_runs_of_other_numbers_of_ranks_stay_within_rounding(
    model_file: Path, honest: Run, tmp_path: Path
) -> None:
    three = record(model_file, tmp_path / "3.npz", 3)
    assert where(honest, three) == (0, 0, "attention")  # other partial sums, other bits
    assert where(honest, three, 1e-5) is None


@pytest.mark.parametrize(
    ("layer", "side", "projection"), [(1, "mlp", "down_proj"), (0, "attention", "qkv_proj"), (1, "attention", "o_proj")]
)
def test_one_weight_rounded_to_bfloat16_is_named(
    layer: int, side: str, projection: str, model_file: Path, honest: Run, tmp_path: Path
) -> None:
    def rounded(model: Model) -> None:
        if model.comm.rank == 1:
            weight = getattr(getattr(model.sharded.decoder.layers[layer], side), projection).weight
            with torch.no_grad():
                weight.copy_(weight.bfloat16().float())

    wrong = record(model_file, tmp_path / "b.npz", change=rounded)
    assert where(honest, wrong, 1e-4) == where(honest, wrong) == (0, layer, "MLP" if side == "mlp" else side)
    assert other_weights(honest, wrong) == [f"rank 1: layers.{layer}.{side}.{projection}.weight"]
    assert wrong.faults() == []


def nth(method: str, n: int, bypass: Callable[..., Any]) -> Callable[[Model], None]:
    """Puts `bypass` in the place of the n-th call of the reducer's `method`, on every rank."""

    def change(model: Model) -> None:
        reducer, calls = model.sharded.reducer, [0]
        honest = getattr(reducer, method)

        def called(*args: Any) -> Any:
            calls[0] += 1
            return bypass(honest, reducer, *args) if calls[0] == n + 1 else honest(*args)

        reducer_class = type(reducer.__class__.__name__, (HiddenReducer,), {method: lambda self, *args: called(*args)})
        reducer.__class__ = reducer_class

    return change


def skipped(honest: Callable[..., Any], reducer: HiddenReducer, partial: Any) -> Any:
    return partial


def kept(honest: Callable[..., Any], reducer: HiddenReducer, partial: Any) -> Any:
    """The sum is made, noted, and thrown away."""
    mine = partial.clone()
    honest(partial)
    return mine


def array_skipped(honest: Callable[..., Any], reducer: HiddenReducer, partial: Any, total: Any) -> None:
    pass


def array_kept(honest: Callable[..., Any], reducer: HiddenReducer, partial: Any, total: Any) -> None:
    mine = partial.copy()
    honest(partial, total)
    partial[:] = mine


N_SUMS = 2 * LAYERS


@pytest.mark.parametrize("n", range(N_SUMS))
def test_a_reduction_that_is_bypassed_in_the_prompt_is_named(
    n: int, model_file: Path, honest: Run, tmp_path: Path
) -> None:
    wrong = record(model_file, tmp_path / "b.npz", change=nth("__call__", n, skipped))
    assert where(honest, wrong, 1e-4) == (0, n // 2, ("attention", "MLP")[n % 2])
    assert "step 0 has 3 reductions, 4 were expected" in wrong.faults()


@pytest.mark.parametrize("n", range(N_SUMS))
def test_a_sum_of_the_prompt_that_is_thrown_away_is_named(n: int, model_file: Path, tmp_path: Path) -> None:
    wrong = record(model_file, tmp_path / "b.npz", change=nth("__call__", n, kept))
    named = f"layer {n // 2}, {('attention', 'MLP')[n % 2]} (step 0, prefill)"
    for rank in (0, 1):
        assert f"rank {rank}: {named}: the result of the reduction was not used" in wrong.faults()
    assert any("rank 1 parts from rank 0 at" in fault for fault in wrong.faults())


@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize("step", [0, 2])
def test_bypasses_of_packed_reductions_are_named_in_the_prompt_and_in_decoding(
    step: int, n: int, model_file: Path, tmp_path: Path
) -> None:
    a = record(model_file, tmp_path / "a.npz", compute="packed")
    at, phase = step * N_SUMS + n, "decode" if step else "prefill"
    skips = record(model_file, tmp_path / "b.npz", change=nth("reduce_array", at, array_skipped), compute="packed")
    assert where(a, skips, 1e-4) == (step, n // 2, ("attention", "MLP")[n % 2])
    assert f"step {step} has 3 reductions, 4 were expected" in skips.faults()
    keeps = record(model_file, tmp_path / "c.npz", change=nth("reduce_array", at, array_kept), compute="packed")
    stage = f"layer {n // 2}, {('attention', 'MLP')[n % 2]} (step {step}, {phase})"
    assert f"rank 0: {stage}: the result of the reduction was not used" in keeps.faults()


def test_the_command_names_where_runs_part(model_file: Path, honest: Run, tmp_path: Path) -> None:
    wrong = record(model_file, tmp_path / "b.npz", change=nth("__call__", 2, skipped))
    file = tmp_path / "x.json"
    shown = CliRunner().invoke(app, ["xray", honest.file, wrong.file, "--json", str(file)])
    assert shown.exit_code == 1
    assert "the runs part at layer 1, attention (step 0, prefill)" in shown.output
    assert json.loads(file.read_text(encoding="utf-8"))["parted"]["stage"]["layer"] == 1
    same = CliRunner().invoke(app, ["xray", honest.file, honest.file])
    assert same.exit_code == 0, same.output
    assert "the same bits in all of them" in same.output


def test_what_is_no_recording_is_refused(tmp_path: Path, honest: Run) -> None:
    (tmp_path / "x").write_text("{}", encoding="utf-8")
    with pytest.raises(ValueError, match="is no recording of a run"):
        Run.read(tmp_path / "x")
    other = Run("b", {**honest.header, "prompt": [1]}, honest.arrays)
    with pytest.raises(ValueError, match="have another prompt"):
        differences(honest, other)
