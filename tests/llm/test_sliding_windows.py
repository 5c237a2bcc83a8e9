"""Layers that see a window of positions: the logits of `transformers`, in one process, on grids and in pipelines."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_models import BASE, TOKENS, alone, close, edit, ours, small
from gguf import GGMLQuantizationType as Kind
from llm_models import write_gguf

import hostring
from hostring.integrations.llm import ContextPlan, RowPlan, StagePlan
from hostring.integrations.llm.checkpoint.weights import open_checkpoint
from hostring.integrations.llm.compute import Plan, build_local
from hostring.integrations.llm.model.tensor_parallel import gather_logits

__all__ = ["alone"]

WINDOW = 6
MODELS: dict[str, tuple[str, dict[str, Any], tuple[int, ...]]] = {
    "mistral": ("mistral", {}, (6, 6)),
    "qwen2": ("qwen2", {"use_sliding_window": True, "max_window_layers": 1}, (0, 6)),
    "qwen3": ("qwen3", {"use_sliding_window": True, "layer_types": ["sliding_attention", "full_attention"]}, (6, 0)),
    "mixtral": ("mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2}, (6, 6)),
}


def saved(name: str, path: Path) -> Any:
    kind, options, _ = MODELS[name]
    if kind == "mixtral":
        import transformers
        from checkpoint_models import random_model

        model = random_model(transformers.MixtralConfig(**{**BASE, **options, "sliding_window": WINDOW}))
    else:
        model = small(kind, **options, sliding_window=WINDOW)
    model.save_pretrained(path)
    return model


@torch.inference_mode()
def wanted(model: Any) -> torch.Tensor:
    logits: torch.Tensor = model(TOKENS).logits
    return logits


@torch.inference_mode()
def in_steps(path: Path, plan: Plan | None, comm: hostring.Comm) -> torch.Tensor | None:
    """Logits after pieces of the prompt, single tokens among them."""
    part, _ = build_local(open_checkpoint(path), comm, "auto", torch.device("cpu"), plan=plan, max_seq=64,
                          hash_activations=False, compile=False)  # fmt: skip
    cache, rows = part.new_cache(), []
    for piece in TOKENS.split([3, 9, 1, 1, 6], 1):
        rows.append(gather_logits(comm, part.step(piece, cache), part.plan, comm.world_size - 1))
    return torch.cat([torch.from_numpy(row) for row in rows if row is not None] or [torch.empty(0)])


@torch.inference_mode()
def each_step(path: Path, plan: Plan, comm: hostring.Comm) -> list[torch.Tensor]:
    """This rank's logits after such pieces, empty where another rank has them."""
    part, _ = build_local(open_checkpoint(path), comm, "auto", torch.device("cpu"), plan=plan, max_seq=64,
                          hash_activations=False, compile=False)  # fmt: skip
    cache, found = part.new_cache(), []
    for piece in TOKENS.split([3, 9, 1, 1, 6], 1):
        logits = part.step(piece, cache)
        found.append(logits.clone() if logits.numel() else torch.empty(0, part.config.vocab_size))
    return found


@pytest.mark.parametrize("name", MODELS)
def test_logits_are_those_of_transformers(name: str, tmp_path: Path, run_ranks: Callable[..., list[Any]]) -> None:
    want = wanted(saved(name, tmp_path))
    assert open_checkpoint(tmp_path).config.windows == MODELS[name][2]
    last = want[0, [2, 11, 12, 13, 19]]
    plans: list[Plan | None] = [None, ContextPlan(2, 1), ContextPlan(1, 2)]
    plans += [StagePlan((1, 1), (1, 1))] if name != "mixtral" else []
    for plan in plans:
        world_size = 1 if plan is None else plan.world_size
        assert close(run_ranks(world_size, partial(in_steps, tmp_path, plan))[-1], last), plan
    ranks = run_ranks(2, partial(each_step, tmp_path, RowPlan((2.0, 1.0))))
    assert close(torch.cat([max(step, key=len) for step in zip(*ranks, strict=True)]), last)


def test_a_window_counts(tmp_path: Path, alone: hostring.Comm) -> None:
    want = wanted(saved("mistral", tmp_path))
    assert close(ours(tmp_path, alone), want)
    edit(tmp_path, sliding_window=WINDOW + 1)
    assert not close(ours(tmp_path, alone), want)
    edit(tmp_path, sliding_window=64)  # all positions that the model has
    assert open_checkpoint(tmp_path).config.windows == ()


def test_gguf_files_of_mistral_have_it_in_all_layers(tmp_path: Path, run_ranks: Callable[..., list[Any]]) -> None:
    model = small("llama")
    path = write_gguf(model, tmp_path / "m.gguf", Kind.Q8_0, change=lambda w: w.add_sliding_window(WINDOW))
    checkpoint = open_checkpoint(path)
    assert checkpoint.config.windows == (WINDOW, WINDOW)
    (found,) = run_ranks(1, partial(in_steps, path, None))  # "auto" is not packed

    def packed(comm: hostring.Comm) -> None:
        build_local(checkpoint, comm, "packed", torch.device("cpu"), plan=None, max_seq=64, hash_activations=False,
                    compile=False)  # fmt: skip

    assert found.shape == (5, 67)
    with hostring.init(0, 1) as comm, pytest.raises(ValueError, match="sliding windows of 6 positions are not"):
        packed(comm)
    path = write_gguf(small("qwen2"), tmp_path / "q.gguf", Kind.F32, change=lambda w: w.add_sliding_window(WINDOW))
    with pytest.raises(ValueError, match=r"qwen2\.attention\.sliding_window is 6; expected 0"):
        open_checkpoint(path)


def test_windows_of_models_that_are_not_known_to_have_them_are_refused(tmp_path: Path) -> None:
    small("smollm3").save_pretrained(tmp_path)
    edit(tmp_path, use_sliding_window=True, sliding_window=WINDOW)
    with pytest.raises(ValueError, match="use_sliding_window is True; expected false: sliding windows of smollm3"):
        open_checkpoint(tmp_path)
    small("llama").save_pretrained(tmp_path)
    edit(tmp_path, sliding_window=WINDOW)
    with pytest.raises(ValueError, match="sliding_window is 6; expected none: sliding windows of llama"):
        open_checkpoint(tmp_path)
