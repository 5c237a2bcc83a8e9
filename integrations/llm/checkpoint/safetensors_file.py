"""Hugging Face directories: `config.json` and safetensors files, of which a rank reads the slices that it needs."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from hostring.integrations.llm.checkpoint.arriving import (
    ArrivingTensor,
    StoredTensor,
    Whole,
    source_of,
    stored_tensors,
)
from hostring.integrations.llm.checkpoint.checkpoint import check_shape, check_tensors, missing
from hostring.integrations.llm.checkpoint.fields import Fields
from hostring.integrations.llm.checkpoint.hf_config import config_from_hf
from hostring.integrations.llm.checkpoint.hf_quantisation import QuantisedLayout, layout_from_hf
from hostring.integrations.llm.checkpoint.json_file import read_json
from hostring.integrations.llm.checkpoint.layout import HEAD, TensorSlice
from hostring.integrations.llm.checkpoint.quantised_matrix import QuantisedMatrix

_DTYPES = ("F32", "F16", "BF16", "F64")
_INDEX = "model.safetensors.index.json"
_OTHERS = re.compile(r"(consolidated|adapter|optimizer|scheduler|training)")  # beside a model, not the model


class SafetensorsCheckpoint:
    """A HF directory: `config.json` with `model.safetensors`, or with shards and `model.safetensors.index.json`.

    Args:
        directory: where they are.
        file: the one file that holds the weights, where the caller has named it.

    Raises:
        FileNotFoundError: a file is missing.
        ValueError: an option or a tensor that this decoder doesn't use, or a file that can't be read.
    """

    def __init__(self, directory: Path, file: Path | None = None) -> None:
        self.directory = directory
        fields = read_json(directory / "config.json")
        self._source = source_of(directory / "config.json")
        self._stored: dict[Path, dict[str, StoredTensor]] = {}
        self._opened: dict[Path, Any] = {}
        self._files = self._find_tensors(file)
        self.config = config_from_hf(directory / "config.json", fields)
        self._quantised: dict[str, QuantisedMatrix] = {}
        layout = layout_from_hf(Fields(directory / "config.json", fields))
        parts = self._open_quantised(layout) if layout is not None else set()
        shapes = {name: self._shape(name) for name in self._files if name not in parts}
        shapes |= {name: matrix.shape for name, matrix in self._quantised.items()}
        if HEAD in shapes:  # a head in the file counts, whatever the config says of tying: as in transformers 5
            self.config = replace(self.config, tie_word_embeddings=False)
        check_tensors(directory, self.config, shapes, harmless=lambda n: n.endswith("rotary_emb.inv_freq"))
        self.bytes_read = 0

    def prepare(self, parts: Iterable[TensorSlice]) -> None:
        """See `Checkpoint`. Quantised matrices come piece by piece, as they are read."""
        if isinstance(self._source, Whole):
            return
        known = [(part, self._files[part.name]) for part in parts if part.name in self._files]
        self._source.plan([self._where(part.name, file).extent(part.rows, part.columns) for part, file in known])

    def _where(self, name: str, file: Path) -> StoredTensor:
        if file not in self._stored:
            self._stored[file] = stored_tensors(file)
        return self._stored[file][name]

    def read(self, part: TensorSlice) -> Tensor:
        if part.name in self._quantised and part.columns is not None:
            return self._dequantised(self._quantised[part.name], part)
        file = self._files.get(part.name)
        if file is None:
            raise missing(self.directory, part.name, part.shape)
        tensor = self._tensor(part.name, file)
        check_shape(file, part.name, part.shape, tuple(tensor.get_shape()))
        rows = slice(part.rows.start, part.rows.stop)
        values: Tensor = tensor[rows] if part.columns is None else tensor[rows, part.columns.start : part.columns.stop]
        self.bytes_read += values.nbytes
        return values

    def _dequantised(self, matrix: QuantisedMatrix, part: TensorSlice) -> Tensor:
        check_shape(self.directory, part.name, part.shape, matrix.shape)
        before = matrix.bytes_read
        values = matrix.read(part.rows, part.columns or range(matrix.shape[1]))
        self.bytes_read += matrix.bytes_read - before
        return values

    def _open_quantised(self, layout: QuantisedLayout) -> set[str]:
        """Open the quantised matrices. Returns the names of all tensors that make them."""
        parts: set[str] = set()
        for stem in layout.stems(self._files):
            names = {end: stem + end for end in layout.companions() if stem + end in self._files}
            tensors = {end: self._tensor(name, self._files[name]) for end, name in names.items()}
            self._quantised[f"{stem}weight"] = QuantisedMatrix(f"{self.directory}: {stem}weight", layout, tensors)
            parts.update(names.values())
        return parts

    def _find_tensors(self, file: Path | None) -> dict[str, Path]:
        """Tensor name to the file that holds it."""
        index = self.directory / _INDEX
        if index.exists():
            files = read_json(index).get("weight_map")
            if not isinstance(files, dict) or not all(isinstance(name, str) for name in files.values()):
                raise ValueError(f"{index}: weight_map should say which file holds each tensor")
            return {name: self.directory / stem for name, stem in files.items()}
        file = self._single() if file is None else file
        return dict.fromkeys(self._open(file).keys(), file)

    def _single(self) -> Path:
        usual = self.directory / "model.safetensors"
        if usual.exists():
            return usual
        found = [file for file in sorted(self.directory.glob("*.safetensors")) if not _OTHERS.match(file.name)]
        if len(found) == 1:
            return found[0]
        pickled = "; *.bin files are not read, save the model as safetensors" if _has_pickles(self.directory) else ""
        raise FileNotFoundError(
            f"{self.directory} has {len(found)} .safetensors files and no {_INDEX}; "
            f"one file or an index is needed{pickled}"
        )

    def _open(self, file: Path) -> Any:
        """Stays mapped for the life of the checkpoint."""
        if file not in self._opened:
            try:
                self._opened[file] = safe_open(file, framework="pt")
            except FileNotFoundError:
                raise FileNotFoundError(f"{_INDEX} names {file.name}, which is not in {self.directory}") from None
            except SafetensorError as exc:
                raise ValueError(f"{file} is no safetensors file, or is cut off: {exc}") from exc
        return self._opened[file]

    def _tensor(self, name: str, file: Path) -> Any:
        try:
            tensor = self._open(file).get_slice(name)
            arrives = not isinstance(self._source, Whole)
            return ArrivingTensor(tensor, self._where(name, file), self._source.read) if arrives else tensor
        except SafetensorError as exc:
            raise ValueError(f"{_INDEX} says that {file} holds {name}, which it does not: {exc}") from exc

    def _shape(self, name: str) -> tuple[int, ...]:
        """Of a tensor whose values mean what they are."""
        file = self._files[name]
        tensor = self._tensor(name, file)
        dtype = tensor.get_dtype()
        if dtype not in _DTYPES:
            raise ValueError(
                f"{file}: {name} is of dtype {dtype}, whose scale is not known; weights in "
                f"{', '.join(_DTYPES)} are read. "
                "Take the original checkpoint, or a GGUF file"
            )
        return tuple(tensor.get_shape())


def _has_pickles(directory: Path) -> bool:
    return any(directory.glob("*.bin")) or any(directory.glob("*.pth"))
