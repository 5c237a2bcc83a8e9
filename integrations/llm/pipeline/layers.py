"""A checkpoint of which a stage sees its own layers alone, numbered from 0."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from torch import Tensor

from hostring.integrations.llm.checkpoint.checkpoint import Checkpoint
from hostring.integrations.llm.checkpoint.gguf_file import GgufCheckpoint
from hostring.integrations.llm.checkpoint.layout import TensorSlice, renumbered


class LayersOf:
    """See `Checkpoint`. Reads from `whole`, which counts the bytes."""

    def __init__(self, whole: Checkpoint, layers: range) -> None:
        self._whole, self._first = whole, layers.start
        self.config = whole.config.of_layers(layers)

    @property
    def bytes_read(self) -> int:
        return self._whole.bytes_read

    @bytes_read.setter
    def bytes_read(self, nbytes: int) -> None:
        self._whole.bytes_read = nbytes

    def prepare(self, parts: Iterable[TensorSlice]) -> None:
        self._whole.prepare([self._named(part) for part in parts])

    def read(self, part: TensorSlice) -> Tensor:
        return self._whole.read(self._named(part))

    def _named(self, part: TensorSlice) -> TensorSlice:
        """As it is called in the whole checkpoint."""
        return replace(part, name=renumbered(part.name, self._first))


def layers_of(checkpoint: Checkpoint, layers: range) -> Checkpoint:
    """`checkpoint` with these layers alone."""
    if isinstance(checkpoint, GgufCheckpoint):  # its blocks are decoded packed, from where they lie
        return checkpoint.of_layers(layers)
    return LayersOf(checkpoint, layers)
