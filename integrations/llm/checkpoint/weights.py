"""Checkpoints on disk: a rank asks for rectangles of tensors and gets those, reading no more than it must."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from hostring.integrations.llm.checkpoint.layout import HEAD, Part, to_hf_state
from hostring.integrations.llm.model.config import ModelConfig
from hostring.integrations.llm.model.qwen import Decoder


class Checkpoint(Protocol):
    """Tensors under HF names, whatever the file format.

    Attributes:
        config: shapes and options of the whole model.
        bytes_read: bytes of tensor data touched so far.
    """

    config: ModelConfig
    bytes_read: int

    def read(self, part: Part) -> Tensor:
        """The values of `part`, in the dtype of the file (f32 where the file is block-quantised).

        Raises:
            ValueError: the tensor is missing or has another shape.
        """


def open_checkpoint(path: str | Path) -> Checkpoint:
    """Open a GGUF file, a HF directory, or the `.safetensors` file of one.

    Raises:
        FileNotFoundError: nothing there, or no weights in the directory.
        ValueError: a format or an architecture that is not supported.
    """
    path = Path(path)
    if not path.exists():
        raise FileNotFoundError(
            f"no model at {path}; give a GGUF file or a directory with config.json and *.safetensors"
        )
    if path.suffix == ".gguf":
        from hostring.integrations.llm.checkpoint.gguf_file import GgufCheckpoint

        return GgufCheckpoint(path)
    return SafetensorsCheckpoint(path if path.is_dir() else path.parent)


def missing(source: object, part: Part) -> ValueError:
    """The error for a tensor that the config implies and the checkpoint lacks."""
    return ValueError(
        f"{source} has no tensor {part.name} of shape {part.shape}; the config says that the model has one"
    )


def check_shape(source: object, part: Part, shape: tuple[int, ...]) -> None:
    """Raise a ValueError unless the tensor has the shape that the config implies."""
    if tuple(shape) != part.shape:
        raise ValueError(f"{source}: {part.name} has shape {tuple(shape)}, the config implies {part.shape}")


class SafetensorsCheckpoint:
    """A HF directory: `config.json` with `model.safetensors`, or with shards and `model.safetensors.index.json`."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        fields = _read_json(directory / "config.json")
        index = directory / "model.safetensors.index.json"
        if index.exists():
            files = _read_json(index).get("weight_map")
            if not isinstance(files, dict) or not all(isinstance(file, str) for file in files.values()):
                raise ValueError(f"{index}: weight_map should say which file holds each tensor")
            self._files: dict[str, Path] = {name: directory / file for name, file in files.items()}
        else:
            single = sorted(directory.glob("*.safetensors"))
            if len(single) != 1:
                raise FileNotFoundError(
                    f"{directory} has {len(single)} .safetensors files and no model.safetensors.index.json; one file or an index is needed"
                )
            with _open(single[0]) as opened:
                self._files = dict.fromkeys(opened.keys(), single[0])
        self.config = ModelConfig.from_hf(fields, self._files.keys())
        self.bytes_read = 0
        self._opened: dict[Path, Any] = {}

    def read(self, part: Part) -> Tensor:
        file = self._files.get(part.name)
        if file is None:
            raise missing(self.directory, part)
        if file not in self._opened:
            self._opened[file] = _open(file)  # stays mapped for the life of the checkpoint
        tensor = self._opened[file].get_slice(part.name)
        check_shape(file, part, tuple(tensor.get_shape()))
        rows = slice(part.rows.start, part.rows.stop)
        values: Tensor = tensor[rows] if part.columns is None else tensor[rows, part.columns.start : part.columns.stop]
        self.bytes_read += values.nbytes
        return values


class ModuleCheckpoint:
    """A whole decoder in memory, seen as a checkpoint, so that cutting it up takes the same path as loading a file."""

    def __init__(self, model: Decoder) -> None:
        self.config = model.config
        self.bytes_read = 0
        self._tensors = to_hf_state(model)

    def read(self, part: Part) -> Tensor:
        tensor = self._tensors.get(part.name)
        if tensor is None:
            raise missing("the model", part)
        check_shape("the model", part, tuple(tensor.shape))
        rows = tensor[part.rows.start : part.rows.stop]
        values = rows if part.columns is None else rows[:, part.columns.start : part.columns.stop]
        self.bytes_read += values.nbytes
        return values.detach()


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
    (directory / "config.json").write_text(json.dumps(fields, indent=2) + "\n")
    file = directory / "model.safetensors"
    save_file(state, file, metadata={"format": "pt"})
    return file


def _read_json(path: Path) -> dict[str, Any]:
    if not path.exists():
        raise FileNotFoundError(f"no {path.name} in {path.parent}")
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as exc:
        raise ValueError(f"{path} can't be read as JSON: {exc}") from exc
    if not isinstance(found, dict):
        raise ValueError(f"{path} should hold a JSON object")
    return found


def _open(file: Path) -> Any:
    try:
        return safe_open(file, framework="pt")
    except SafetensorError as exc:
        raise ValueError(f"{file} is no safetensors file, or is cut off: {exc}") from exc
