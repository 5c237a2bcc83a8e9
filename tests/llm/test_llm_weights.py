"""Reading checkpoints: the right slices, no more than those, and errors that name the tensor."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from llm_models import hf_model, save
from safetensors.torch import load_file, save_file

import hostring
from hostring.integrations.llm.checkpoint.layout import TensorSlice, slices_of_rank
from hostring.integrations.llm.checkpoint.safetensors_file import SafetensorsCheckpoint
from hostring.integrations.llm.checkpoint.weights import open_checkpoint
from hostring.integrations.llm.checkpoint.whole_model import to_hf_state
from hostring.integrations.llm.model.shards import ShardPlan
from hostring.integrations.llm.sharded import build


def test_the_slices_of_all_ranks_are_the_file(tmp_path: Path) -> None:
    oracle = hf_model("llama-biased-long")
    checkpoint = open_checkpoint(save(oracle, tmp_path))
    state = oracle.state_dict()
    plan = ShardPlan.balanced(checkpoint.config, 3)
    seen: dict[str, list[torch.Tensor]] = {}
    for rank in range(3):
        for parts in slices_of_rank(checkpoint.config, plan, rank).values():
            for part in parts:
                seen.setdefault(part.name, []).append(checkpoint.read(part))
    assert seen.keys() == state.keys()
    for name, pieces in seen.items():
        if pieces[0].shape == state[name].shape:
            whole = pieces[0]
        else:
            whole = torch.cat(pieces, 1 if name.endswith(("o_proj.weight", "down_proj.weight")) else 0)
        torch.testing.assert_close(whole, state[name], rtol=0, atol=0)


def test_a_sharded_checkpoint_reads_like_a_single_file(tmp_path: Path, run_ranks: Callable[..., list[Any]]) -> None:
    oracle = hf_model("qwen3-untied-biased")
    save(oracle, tmp_path / "one")
    save(oracle, tmp_path / "many", max_shard_size="40KB")
    assert len(list((tmp_path / "many").glob("*.safetensors"))) > 3
    tokens = torch.tensor([[1, 2, 3]])

    def logits(comm: hostring.Comm) -> list[torch.Tensor]:
        with torch.inference_mode():
            return [build(open_checkpoint(tmp_path / d), comm).decoder(tokens) for d in ("one", "many")]

    one, many = run_ranks(1, logits)[0]
    assert torch.equal(one, many)


@pytest.mark.parametrize("world_size", [2, 3, 5])
def test_a_rank_reads_its_share(world_size: int, tmp_path: Path, run_ranks: Callable[..., list[Any]]) -> None:
    save(hf_model("qwen3-untied-biased").to(torch.bfloat16), tmp_path)
    whole = open_checkpoint(tmp_path)
    config = whole.config
    total = sum(
        whole.read(p).nbytes
        for parts in slices_of_rank(config, ShardPlan.balanced(config, 1), 0).values()
        for p in parts
    )

    def read(comm: hostring.Comm) -> tuple[int, int]:
        checkpoint = open_checkpoint(tmp_path)
        plan = build(checkpoint, comm, replicate_embedding=False).plan
        return checkpoint.bytes_read, 2 * plan.n_elements(config, comm.rank)

    results = run_ranks(world_size, read)
    for got, matrices in results:
        # Beside the matrices: this rank's embedding rows, the norms, and biases, which are less than 5 % here.
        embedding = 2 * (config.vocab_size // world_size + 1) * config.hidden_size
        assert matrices < got < 1.05 * (matrices + embedding)
    assert total <= sum(got for got, _ in results) <= 1.05 * total  # norms are read by all


def test_a_missing_tensor_is_an_error_that_names_it(tmp_path: Path, run_ranks: Callable[..., list[Any]]) -> None:
    save(hf_model("qwen3-untied-biased"), tmp_path)
    file = tmp_path / "model.safetensors"
    state = load_file(file)
    for name in ("lm_head.weight", "model.layers.1.mlp.up_proj.weight", "model.layers.2.input_layernorm.weight"):
        save_file({n: t for n, t in state.items() if n != name}, file)
        outcome = run_ranks(1, lambda comm: build(open_checkpoint(tmp_path), comm), check=False)[0]
        assert isinstance(outcome, ValueError)
        assert f"no tensor {name}" in str(outcome)


def test_a_misshapen_tensor_is_an_error(tmp_path: Path) -> None:
    save(hf_model("qwen3-tied"), tmp_path)
    file = tmp_path / "model.safetensors"
    state = load_file(file)
    state["model.layers.0.mlp.up_proj.weight"] = state["model.layers.0.mlp.up_proj.weight"][:-1].clone()
    save_file(state, file)
    part = TensorSlice("model.layers.0.mlp.up_proj.weight", (90, 60), range(0, 10), range(60))
    with pytest.raises(ValueError, match=r"up_proj.weight has shape \(89, 60\), the config implies \(90, 60\)"):
        open_checkpoint(tmp_path).read(part)


def test_what_is_no_checkpoint_says_so(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="give a GGUF file or a directory"):
        open_checkpoint(tmp_path / "nothing")
    with pytest.raises(FileNotFoundError, match=r"no config\.json"):
        open_checkpoint(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen3"}), encoding="utf-8")
    with pytest.raises(FileNotFoundError, match=r"has 0 \.safetensors files"):
        SafetensorsCheckpoint(tmp_path)


def test_a_whole_decoder_gives_back_the_names_of_the_file(tmp_path: Path, run_ranks: Callable[..., list[Any]]) -> None:
    oracle = hf_model("qwen2")
    save(oracle, tmp_path)

    def state(comm: hostring.Comm) -> dict[str, torch.Tensor]:
        return to_hf_state(build(open_checkpoint(tmp_path), comm).decoder)

    got, want = run_ranks(1, state)[0], oracle.state_dict()
    assert got.keys() == want.keys()
    assert all(torch.equal(got[n], want[n]) for n in want)
