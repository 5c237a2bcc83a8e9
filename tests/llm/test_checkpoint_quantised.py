"""Quantised matrices of HF directories: fp8 in blocks and compressed-tensors, against their written definitions, and
every night against the compressed-tensors library."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_models import TOKENS, alone, close, edit, small
from safetensors.torch import load_file, save_file
from torch import Tensor

import hostring
from hostring.integrations.llm.checkpoint.layout import slices_of_rank
from hostring.integrations.llm.checkpoint.weights import open_checkpoint
from hostring.integrations.llm.model.shards import ShardPlan
from hostring.integrations.llm.model.tensor_parallel import gather_logits
from hostring.integrations.llm.planning.model_file import read_model_file
from hostring.integrations.llm.sharded import build

__all__ = ["alone"]

FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [16, 32]}
WAYS: dict[str, dict[str, Any]] = {
    "int4-group": {"num_bits": 4, "strategy": "group", "group_size": 8},
    "int4-channel": {"num_bits": 4, "strategy": "channel"},
    "int4-group-asymmetric": {"num_bits": 4, "strategy": "group", "group_size": 8, "symmetric": False},
    "int8-packed": {"num_bits": 8, "strategy": "group", "group_size": 8},
    "int8-channel": {"num_bits": 8, "strategy": "channel"},
    "int8-channel-asymmetric": {"num_bits": 8, "strategy": "channel", "symmetric": False},
    "int8-tensor": {"num_bits": 8, "strategy": "tensor"},
    "fp8-channel": {"num_bits": 8, "strategy": "channel", "type": "float"},
    "fp8-block": {"num_bits": 8, "strategy": "block", "type": "float", "block_structure": [16, 32]},
}


def form_of(name: str) -> str:
    return "pack-quantized" if "int4" in name or "packed" in name else f"{name.split('-')[0].rstrip('8')}-quantized"


def config_of(name: str) -> dict[str, Any]:
    if name == "fp8":
        return FP8
    form = form_of(name).replace("fp-", "float-")
    weights = {"type": "int", "symmetric": True, "dynamic": False, "observer": "minmax", **WAYS[name]}
    groups = {"group_0": {"targets": ["Linear"], "weights": weights, "input_activations": None, "format": form}}
    rest = {"ignore": ["lm_head"], "kv_cache_scheme": None, "sparsity_config": {"format": "dense"}, "version": "0.9"}
    return {"quant_method": "compressed-tensors", "format": form, "config_groups": groups, **rest}


def block_of(name: str, shape: torch.Size) -> tuple[int, int]:
    if name == "fp8":
        return 16, 32
    way = WAYS[name]
    sides = {"tensor": tuple(shape), "channel": (1, shape[1]), "group": (1, way.get("group_size")), "block": (16, 32)}
    found: tuple[int, int] = sides[way["strategy"]]
    return found


def quantised(name: str, weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    """The tensors of a random matrix of this shape, by the ends of their names, and the values that they stand for."""
    generator = torch.Generator().manual_seed(weight.numel())
    rows, columns = weight.shape
    high, wide = block_of(name, weight.shape)
    blocks = -(-rows // high), -(-columns // wide)
    scale = (torch.rand(blocks, generator=generator) + 0.5) / 20
    spread = [torch.arange(size) // block for size, block in zip(weight.shape, (high, wide), strict=True)]

    def every(of_blocks: Tensor) -> Tensor:
        return of_blocks[spread[0]][:, spread[1]]

    if "fp8" in name:
        numbers = (weight * 20).to(torch.float8_e4m3fn)
        return {"weight": numbers, "weight_scale_inv" if name == "fp8" else "weight_scale": scale}, (
            numbers.float() * every(scale)
        )
    bits = WAYS[name]["num_bits"]
    half = 1 << (bits - 1)
    numbers = torch.randint(-half, half, weight.shape, generator=generator)
    zeros = torch.zeros(blocks, dtype=torch.long)
    if not WAYS[name].get("symmetric", True):
        zeros = torch.randint(-half, half, blocks, generator=generator)
    scale = (scale * 8 / half).bfloat16()
    values = (numbers - every(zeros)) * every(scale).float()
    if form_of(name) == "pack-quantized":
        found = {"weight_packed": packed(numbers, bits), "weight_shape": torch.tensor(weight.shape)}
        zero_points = packed(zeros.T, bits).T.contiguous()
    else:
        found, zero_points = {"weight": numbers.to(torch.int8)}, zeros.to(torch.int8)
    if not WAYS[name].get("symmetric", True):
        found["weight_zero_point"] = zero_points
    return {**found, "weight_scale": scale.reshape(1) if blocks == (1, 1) else scale}, values


def packed(numbers: Tensor, bits: int) -> Tensor:
    """Numbers with an offset, several to a 32-bit word, the first in its lowest bits."""
    per_word, unsigned = 32 // bits, numbers + (1 << (bits - 1))
    padded = torch.nn.functional.pad(unsigned, (0, -numbers.shape[1] % per_word)).unflatten(1, (-1, per_word))
    words = (padded << (torch.arange(per_word) * bits)).sum(-1)
    return torch.where(words >= 1 << 31, words - (1 << 32), words).to(torch.int32)


def save_quantised(name: str, directory: Path) -> Any:
    """A directory whose layers are quantised, and the model of `transformers` with the values that they stand for."""
    model = small("llama", num_attention_heads=6, num_key_value_heads=3, head_dim=12)
    model.save_pretrained(directory)
    file = directory / "model.safetensors"
    state = load_file(file)
    for key in [key for key in state if "proj.weight" in key]:
        tensors, values = quantised(name, state.pop(key))
        state |= {key.removesuffix("weight") + end: tensor for end, tensor in tensors.items()}
        with torch.no_grad():
            model.get_parameter(key).copy_(values)
    save_file(state, file)
    edit(directory, quantization_config=config_of(name))
    return model


@pytest.mark.parametrize("name", ["fp8", *WAYS])
def test_logits_are_those_of_the_dequantised_values(
    name: str, tmp_path: Path, run_ranks: Callable[..., list[Any]]
) -> None:
    model = save_quantised(name, tmp_path)
    with torch.inference_mode():
        want = model(TOKENS).logits

    @torch.inference_mode()
    def body(comm: hostring.Comm) -> Tensor | None:
        part = build(open_checkpoint(tmp_path), comm, max_seq=64)
        whole = gather_logits(comm, part.decoder(TOKENS), part.plan)
        return None if whole is None else torch.from_numpy(whole)

    for world_size in (1, 2, 3):
        assert close(run_ranks(world_size, body)[0], want), world_size


@pytest.mark.parametrize("name", ["fp8", "int4-group-asymmetric", "int8-channel-asymmetric", "int8-tensor"])
def test_a_rank_reads_its_part_alone(name: str, tmp_path: Path) -> None:
    """Cuts lie inside of blocks and words; the values are those of the whole matrix, bit for bit."""
    model = save_quantised(name, tmp_path)
    state = model.state_dict()
    checkpoint = open_checkpoint(tmp_path)
    plan = ShardPlan((1, 2), (13, 43), (33, 34))
    read = []
    for rank in range(2):
        before = checkpoint.bytes_read
        for parts in slices_of_rank(checkpoint.config, plan, rank).values():
            for part in (part for part in parts if "proj" in part.name and part.columns is not None):
                want = state[part.name][part.rows.start : part.rows.stop, part.columns.start : part.columns.stop]
                assert torch.equal(checkpoint.read(part), want), part
        read.append(checkpoint.bytes_read - before)
    assert read[0] < 0.6 * sum(read)
    planned = read_model_file(tmp_path)
    assert planned.mlp_out.elements >= 2 * 48 * 56  # words are padded
    assert planned.mlp_out.nbytes < 2 * 48 * 56 * 3


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"quant_method": "gptq", "bits": 4}, r"weights are quantised \('gptq'\), which is not supported; read are 'fp8'"),
    ({"quant_method": "mxfp4"}, r"'mxfp4'"),
    ({**FP8, "weight_block_size": None}, "weight_block_size is None; expected two numbers"),
    ({**FP8, "fmt": "e5m2"}, "fmt is 'e5m2'; expected 'e4m3'"),
    ({**FP8, "new_option": 1}, "new_option is 1, which this decoder does not know"),
]


@pytest.mark.parametrize(("config", "message"), REFUSED)
def test_other_quantisation_is_refused_by_name(config: dict[str, Any], message: str, tmp_path: Path) -> None:
    small("llama").save_pretrained(tmp_path)
    edit(tmp_path, quantization_config=config)
    with pytest.raises(ValueError, match=message) as caught:
        open_checkpoint(tmp_path)
    assert "config.json" in str(caught.value)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"format": "nvfp4-pack-quantized"}, "the format 'nvfp4-pack-quantized' is not supported"),
        ({"kv_cache_scheme": {"num_bits": 8}}, "kv_cache_scheme is"),
        ({"sparsity_config": {"format": "sparse-bitmask"}}, "sparsity_config is"),
        ({"weights": {"num_bits": 3, "strategy": "channel"}}, r"num_bits is 3; expected 8 bits, or 4"),
        ({"weights": {"num_bits": 4, "strategy": "tensor_group"}}, "the strategy 'tensor_group' is not supported"),
        ({"weights": {"num_bits": 4, "strategy": "channel", "actorder": "group"}}, "actorder is 'group'"),
        ({"config_groups": {"a": {"weights": {"num_bits": 4}}, "b": {"weights": {}}}}, "config_groups is"),
    ],
)
def test_other_compressed_tensors_are_refused_by_name(change: dict[str, Any], message: str, tmp_path: Path) -> None:
    small("llama").save_pretrained(tmp_path)
    config = config_of("int4-channel")
    weights = change.pop("weights", None)
    if weights is not None:
        config["config_groups"]["group_0"]["weights"] = weights
    edit(tmp_path, quantization_config={**config, **change})
    with pytest.raises(ValueError, match=message):
        open_checkpoint(tmp_path)


def test_tensors_that_do_not_fit_are_named(tmp_path: Path) -> None:
    save_quantised("int4-group", tmp_path)
    file = tmp_path / "model.safetensors"
    state, stem = load_file(file), "model.layers.1.mlp.down_proj."
    for end, tensor, message in (
        ("weight_packed", None, "is quantised, and its weight_packed is missing"),
        ("weight_scale", torch.ones(48, 6), r"has scales of shape \(48, 6\); expected \(48, 7\)"),
        (
            "weight_scale",
            torch.ones(48, 7, dtype=torch.int8),
            "its weight_scale is of dtype I8; F32, F16, BF16 are read",
        ),
        ("weight_packed", torch.ones(48, 8, dtype=torch.int32), r"of shape \(48, 56\) has numbers of shape \(48, 8\)"),
        ("weight_g_idx", torch.ones(56, dtype=torch.int32), r"down_proj\.weight_g_idx"),
    ):
        changed = {**state, stem + end: tensor}
        save_file({key: value for key, value in changed.items() if value is not None}, file)
        with pytest.raises(ValueError, match=message) as caught:
            open_checkpoint(tmp_path)
        assert "down_proj" in str(caught.value)


@pytest.mark.slow
@pytest.mark.parametrize("name", WAYS)
def test_the_library_reads_the_same_values(name: str) -> None:
    """Of the tensors that the tests above write."""
    library = pytest.importorskip("compressed_tensors.compressors.base")
    quantization = pytest.importorskip("compressed_tensors.quantization")
    config = config_of(name)
    scheme = quantization.QuantizationScheme(targets=["Linear"], weights=quantization.QuantizationArgs(**WAYS[name]))
    tensors, want = quantised(name, torch.randn(36, 56, generator=torch.Generator().manual_seed(3)))
    tensors["weight_scale"] = tensors["weight_scale"].float()
    got = library.BaseCompressor.get_value_from_registry(config["format"]).decompress(tensors, scheme)["weight"]
    torch.testing.assert_close(got, want, rtol=1e-6, atol=0)
