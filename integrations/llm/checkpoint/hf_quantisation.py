"""`quantization_config` of `config.json`: how quantised matrices lie in the safetensors files, or why they can't be
read."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from hostring.integrations.llm.checkpoint.fields import Fields

FIELD = "quantization_config"
_FORMATS = ("pack-quantized", "int-quantized", "float-quantized", "naive-quantized")
_STRATEGIES = ("tensor", "channel", "group", "block")
_SAYS_NOTHING = ("fmt", "activation_scheme", "modules_to_not_convert", "ignored_layers", "dequantize", "use_deep_gemm")
_OF_COMPRESSION = ("quantization_status", "global_compression_ratio", "ignore", "version")
_OF_WEIGHTS = ("observer", "observer_kwargs", "scale_dtype", "zp_dtype", "dynamic")


@dataclass(frozen=True)
class QuantisedLayout:
    """How a quantised matrix lies in a file: value = (number - zero point) * scale.

    Attributes:
        scale: end of the name of its scales; a matrix without them is not quantised.
        rows, columns: how many of them share a scale; None for all.
        packed_bits: of one number, where 32-bit words hold several (`weight_packed`); 0 where each has an element of
            its own (`weight`).
        zero_points: whether there are zero points, beside the scales.
    """

    scale: str
    rows: int | None
    columns: int | None
    packed_bits: int = 0
    zero_points: bool = False

    @property
    def numbers(self) -> str:
        """End of the name of the numbers."""
        return "weight_packed" if self.packed_bits else "weight"

    def companions(self) -> tuple[str, ...]:
        """Ends of the names of all tensors that make a matrix."""
        zeros = ("weight_zero_point",) if self.zero_points else ()
        return (self.numbers, self.scale, *zeros, *(("weight_shape",) if self.packed_bits else ()))

    def stems(self, names: Collection[str]) -> list[str]:
        """Of the matrices that are quantised, in a file with these tensors; each stem ends in a dot."""
        return [name[: -len(self.scale)] for name in names if name.endswith(f".{self.scale}")]


def layout_from_hf(fields: Fields) -> QuantisedLayout | None:
    """The layout that `config.json` describes; None where it says nothing of quantised weights.

    Raises:
        ValueError: another method, or a format of it, that is not read here.
    """
    values = fields.get(FIELD)
    if values is None:
        return None
    method = values.get("quant_method", "unknown") if isinstance(values, Mapping) else values
    if not isinstance(values, Mapping) or method not in ("fp8", "compressed-tensors"):
        raise ValueError(
            f"{fields.source}: {FIELD} says that the weights are quantised ({method!r}), which is not supported; read "
            "are 'fp8' in blocks and 'compressed-tensors'. Take the original checkpoint, or a GGUF file"
        )
    said = Fields(f"{fields.source}: {FIELD}", values)
    said.ignore(("quant_method",))
    layout = _fp8(said) if method == "fp8" else _compressed(said)
    said.refuse_unknown(what="parameters of quantised weights")
    return layout


def _fp8(said: Fields) -> QuantisedLayout:
    said.ignore(_SAYS_NOTHING)
    said.only("fmt", "e4m3")
    rows, columns = _block(said, "weight_block_size")
    return QuantisedLayout("weight_scale_inv", rows, columns)


def _compressed(said: Fields) -> QuantisedLayout:
    form = said.choice("format", _FORMATS, what="the format")
    said.ignore(_OF_COMPRESSION)
    said.only("kv_cache_scheme")
    sparsity = said.get("sparsity_config")
    if not (isinstance(sparsity, Mapping) and sparsity.get("format") == "dense"):  # which stores nothing else
        said.only("sparsity_config", {})
    said.only("transform_config", {})
    weights = _weights(said)
    strategy = weights.choice("strategy", _STRATEGIES, what="the strategy")
    bits, number = weights.whole("num_bits"), weights.choice("type", ("int", "float"), "int")
    read = ((4, "int"), (8, "int")) if form == "pack-quantized" else ((8, "int"), (8, "float"))
    if (bits, number) not in read:
        raise weights.wrong("num_bits", f"8 bits, or 4 of type int in pack-quantized (type is {number}, in {form})")
    weights.only("actorder", False, "weight", "static")
    weights.ignore(_OF_WEIGHTS)
    rows, columns = None, None
    if strategy in ("channel", "group"):
        rows, columns = 1, weights.whole("group_size") if strategy == "group" else None
    if strategy == "block":
        rows, columns = _block(weights, "block_structure")
    weights.ignore(("group_size", "block_structure"))
    symmetric = weights.flag("symmetric", True)
    weights.refuse_unknown(what="parameters of quantised weights")
    packed = bits if form == "pack-quantized" else 0
    return QuantisedLayout("weight_scale", rows, columns, packed, not symmetric)


def _weights(said: Fields) -> Fields:
    """How the weights are quantised: in one way."""
    groups = said.get("config_groups")
    if not isinstance(groups, Mapping) or not all(isinstance(group, Mapping) for group in groups.values()):
        raise said.wrong("config_groups", "objects that say how weights are quantised")
    ways: list[Any] = [group.get("weights") for group in groups.values()]
    if not ways or not isinstance(ways[0], Mapping) or any(way != ways[0] for way in ways):
        raise said.wrong("config_groups", "weights that are all quantised in one way")
    return Fields(f"{said.source}.config_groups", ways[0])


def _block(fields: Fields, name: str) -> tuple[int, int]:
    block = fields.get(name)
    if not (isinstance(block, list) and len(block) == 2 and all(type(n) is int and n > 0 for n in block)):
        raise fields.wrong(name, "two numbers, the rows and columns that share a scale")
    return block[0], block[1]
