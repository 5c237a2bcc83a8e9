"""What a plan needs of a checkpoint: shapes, formats and sizes, from its header alone. No weights are read, no torch is
imported."""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from hostring.integrations.llm.checkpoint.fields import Fields
from hostring.integrations.llm.checkpoint.gguf_config import config_from_gguf
from hostring.integrations.llm.checkpoint.gguf_header import TensorInfo
from hostring.integrations.llm.checkpoint.gguf_names import gguf_name
from hostring.integrations.llm.checkpoint.gguf_parts import read_parts
from hostring.integrations.llm.checkpoint.hf_config import config_from_hf
from hostring.integrations.llm.checkpoint.hf_quantisation import QuantisedLayout, layout_from_hf
from hostring.integrations.llm.checkpoint.json_file import read_json
from hostring.integrations.llm.checkpoint.layout import slices_of_rank
from hostring.integrations.llm.checkpoint.locate import find_gguf
from hostring.integrations.llm.model.config import ModelConfig
from hostring.integrations.llm.model.shards import ShardPlan
from hostring.integrations.llm.packed.plan import UnitPlan
from hostring.integrations.llm.packed.weights import column_units, unsupported

MAX_HEADER_NBYTES = 100 << 20  # of one safetensors file, as its own library allows
_ELEMENT_NBYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "F8_E4M3": 1, "I8": 1, "I32": 4, "I64": 8}
_INDEX = "model.safetensors.index.json"


@dataclass(frozen=True)
class Matrices:
    """Amounts of one kind of matrix over all layers.

    Attributes:
        elements: of all of them. nbytes: as they are in the file.
    """

    elements: int
    nbytes: int


@dataclass(frozen=True)
class ModelFile:
    """A checkpoint's header.

    Attributes:
        path: of the checkpoint. config: the whole model.
        attention_in: q, k, v. attention_out: the output projection. mlp_in: gate, up. mlp_out: down.
        head: the output head. embedding: what is looked up. small: norms and biases.
        units: where packed compute may cut; None where the file can't be computed packed. why_not_packed: why then.
    """

    path: Path
    config: ModelConfig
    attention_in: Matrices
    attention_out: Matrices
    mlp_in: Matrices
    mlp_out: Matrices
    head: Matrices
    embedding: Matrices
    small: Matrices
    units: UnitPlan | None
    why_not_packed: str

    @property
    def read_share(self) -> float:
        """The part of the MLP's matrices that a token reads: of many experts, those that it uses."""
        if (mixture := self.config.experts) is None:
            return 1.0
        columns, shared = self.config.intermediate_size, mixture.shared_columns
        return (mixture.used * columns + shared) / (mixture.count * columns + shared)

    @property
    def nbytes(self) -> int:
        """Of all tensors in the file."""
        parts = (self.attention_in, self.attention_out, self.mlp_in, self.mlp_out, self.embedding, self.small)
        return sum(part.nbytes for part in parts) + (0 if self.config.tie_word_embeddings else self.head.nbytes)


def read_model_file(path: str | Path) -> ModelFile:
    """Read the header of a GGUF file, or of a Hugging Face directory.

    Raises:
        FileNotFoundError: nothing there.
        ValueError: a format, architecture or option that is not supported, or a tensor is missing.
    """
    gguf = find_gguf(path)
    if gguf is not None:
        parts = read_parts(gguf)
        tensors = parts.tensors
        config = config_from_gguf(gguf, parts.fields, {name: info.shape for name, info in tensors.items()})
        sizes = {name: _size(info) for name, info in tensors.items()}
        return _model_file(gguf, config, sizes, gguf_name, *_units(config, tensors))
    path = Path(path)
    directory = path if path.is_dir() else path.parent
    config = config_from_hf(directory / "config.json", read_json(directory / "config.json"))
    layout = layout_from_hf(Fields(directory / "config.json", read_json(directory / "config.json")))
    sizes = _safetensors_sizes(directory, path if path.is_file() else None)
    sizes = sizes if layout is None else _with_quantised(sizes, layout)
    config = replace(config, tie_word_embeddings="lm_head.weight" not in sizes)
    return _model_file(path, config, sizes, str, None, "only GGUF files hold weights that can be decoded packed")


_KINDS = {
    "attention_in": "attention.qkv_proj.weight",
    "attention_out": "attention.o_proj.weight",
    "mlp_in": "gate_up_proj.weight",
    "mlp_out": "down_proj.weight",
    "embedding": "embed.weight",
    "head": "head.weight",
}
"""How the parameters of each kind end."""


def _model_file(
    path: Path,
    config: ModelConfig,
    sizes: dict[str, Matrices],
    named: Callable[[str], str],
    units: UnitPlan | None,
    why_not_packed: str,
) -> ModelFile:
    def total(wanted: Iterable[str]) -> Matrices:
        wanted = list(wanted)
        absent = [name for name in wanted if name not in sizes]
        if absent:
            raise ValueError(f"{path} has no tensor {absent[0]}, which its config implies; it can't be planned for")
        return Matrices(sum(sizes[n].elements for n in wanted), sum(sizes[n].nbytes for n in wanted))

    whole = ShardPlan((config.num_key_value_heads,), (config.intermediate_size,), (config.vocab_size,))
    slices = slices_of_rank(config, whole, 0)
    found = {
        kind: [named(part.name) for name, parts in slices.items() if name.endswith(end) for part in parts]
        for kind, end in _KINDS.items()
    }
    used = {name for wanted in found.values() for name in wanted}
    return ModelFile(
        path=path,
        config=config,
        **{kind: total(wanted) for kind, wanted in found.items()},
        small=total(name for name in sizes if name not in used),
        units=units,
        why_not_packed=why_not_packed,
    )


def _size(info: TensorInfo) -> Matrices:
    n_rows = math.prod(info.shape[:-1])
    return Matrices(n_rows * info.shape[-1], n_rows * info.row_nbytes)


def _units(config: ModelConfig, tensors: dict[str, TensorInfo]) -> tuple[UnitPlan | None, str]:
    """Where packed compute may cut this file, or why it can't compute it."""
    if why := unsupported(config, tensors):
        return None, why
    try:
        return UnitPlan.of(config, *column_units(config, tensors)), ""
    except (ValueError, KeyError) as exc:
        return None, str(exc)


def _safetensors_sizes(directory: Path, file: Path | None) -> dict[str, Matrices]:
    index = directory / _INDEX
    if index.exists():
        files = {directory / name for name in read_json(index).get("weight_map", {}).values()}
    else:
        files = {file} if file is not None else set(directory.glob("*.safetensors"))
    if not files:
        raise FileNotFoundError(f"{directory} has no .safetensors file")
    sizes: dict[str, Matrices] = {}
    for one in sorted(files):
        for name, tensor in _safetensors_header(one).items():
            if tensor["dtype"] not in _ELEMENT_NBYTES:
                raise ValueError(f"{one}: {name} is of dtype {tensor['dtype']}; {', '.join(_ELEMENT_NBYTES)} are read")
            elements = math.prod(tensor["shape"])
            sizes[name] = Matrices(elements, elements * _ELEMENT_NBYTES[tensor["dtype"]])
    return sizes


def _with_quantised(sizes: dict[str, Matrices], layout: QuantisedLayout) -> dict[str, Matrices]:
    """The same with one entry for each quantised matrix: its elements, and the bytes of all tensors that make it."""
    found = dict(sizes)
    for stem in layout.stems(sizes):
        parts = [found.pop(stem + end) for end in layout.companions() if stem + end in found]
        numbers = sizes[stem + layout.numbers].elements
        elements = numbers * 32 // layout.packed_bits if layout.packed_bits else numbers
        found[f"{stem}weight"] = Matrices(elements, sum(part.nbytes for part in parts))
    return found


def _safetensors_header(file: Path) -> dict[str, Any]:
    with file.open("rb") as opened:
        start = opened.read(8)
        nbytes = struct.unpack("<Q", start)[0] if len(start) == 8 else 0
        if not 2 <= nbytes <= MAX_HEADER_NBYTES:
            raise ValueError(f"{file} is no safetensors file: its header would have {nbytes} bytes")
        try:
            header = json.loads(opened.read(nbytes))
        except ValueError as exc:
            raise ValueError(f"{file} is no safetensors file, or is cut off: {exc}") from exc
    header.pop("__metadata__", None)
    return dict(header)
