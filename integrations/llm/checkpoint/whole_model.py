"""A whole decoder in memory as a checkpoint: to be cut up, or to be written to a HF directory."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from hostring.integrations.llm.checkpoint.checkpoint import check_shape, missing
from hostring.integrations.llm.checkpoint.layout import HEAD, TensorSlice, slices_of_rank
from hostring.integrations.llm.model.qwen import Decoder
from hostring.integrations.llm.model.shards import ShardPlan


class ModuleCheckpoint:
    """A whole decoder in memory, seen as a checkpoint, so that cutting it up takes the same path as loading a file."""

    def __init__(self, model: Decoder) -> None:
        self.config = model.config
        self.bytes_read = 0
        self._tensors = to_hf_state(model)

    def prepare(self, parts: Iterable[TensorSlice]) -> None:
        """See `Checkpoint`. All is here."""

    def read(self, part: TensorSlice) -> Tensor:
        tensor = self._tensors.get(part.name)
        if tensor is None:
            raise missing("the model", part.name, part.shape)
        check_shape("the model", part.name, part.shape, tuple(tensor.shape))
        rows = tensor[part.rows.start : part.rows.stop]
        values = rows if part.columns is None else rows[:, part.columns.start : part.columns.stop]
        self.bytes_read += values.nbytes
        return values.detach()


def to_hf_state(model: Decoder) -> dict[str, torch.Tensor]:
    """The tensors of a whole decoder under HF names; views where possible."""
    config = model.config
    whole = ShardPlan((config.num_key_value_heads,), (config.intermediate_size,), (config.vocab_size,))
    parameters = model.state_dict(keep_vars=False)
    found: dict[str, torch.Tensor] = {}
    for name, parts in slices_of_rank(config, whole, 0).items():
        pieces = parameters[name].split([len(p.rows) for p in parts])
        found.update({part.name: piece for part, piece in zip(parts, pieces, strict=True)})
    return found


def save_hf(
    model: Decoder, directory: str | Path, dtype: torch.dtype = torch.bfloat16, extra: Mapping[str, Any] | None = None
) -> Path:
    """Write `config.json` and `model.safetensors` so that this package and `transformers` can load them.

    Args:
        model: a whole decoder.
        directory: made when missing.
        dtype: of the file.
        extra: more fields for `config.json`, such as `eos_token_id`.

    Returns:
        the path of the safetensors file.
    """
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    state = {name: t.detach().to(dtype).contiguous() for name, t in to_hf_state(model).items()}
    if not model.config.tie_word_embeddings:
        state[HEAD] = state[HEAD].clone()
    fields = {**model.config.to_hf(), "torch_dtype": str(dtype).removeprefix("torch."), **(extra or {})}
    (directory / "config.json").write_text(json.dumps(fields, indent=2) + "\n", encoding="utf-8")
    file = directory / "model.safetensors"
    save_file(state, file, metadata={"format": "pt"})
    return file
