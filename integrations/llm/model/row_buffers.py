"""What the calls of a step of one row read and write."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from hostring.integrations.llm.model.cache import KVSlot
from hostring.integrations.llm.model.tensor_parallel import Call


class RowBuffers:
    """The stream, the tables of this step's position, and scratch that all layers share.

    Attributes:
        h: the residual stream, shape (1, hidden). x: h after a norm.
        tables: cosines and signed sines of this step's position, shape (1, (heads + 2 kv_heads) * head_dim) each.
        slots: of this step's position, by layer.
    """

    def __init__(self, hidden_size: int, table_width: int) -> None:
        self.h, self.x = torch.empty(1, hidden_size), torch.empty(1, hidden_size)
        self.tables = torch.empty(1, table_width), torch.empty(1, table_width)
        self.slots: list[KVSlot] = []
        self._named: dict[tuple[str, int, torch.dtype], Tensor] = {}

    def of(self, name: str, width: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """The row of this name and width, shape (1, width): the same one for every layer."""
        key = (name, width, dtype)
        return self._named.setdefault(key, torch.zeros(1, width, dtype=dtype))

    def widened(self, x: Tensor, calls: list[Call]) -> Tensor:
        """x in f32, after `calls`, to which this may add one."""
        if x.dtype == torch.float32:
            return x
        wide = self.of("widened", x.shape[1])
        calls.append(partial(wide.copy_, x))
        return wide

    def round(self, x: Tensor, dtype: torch.dtype, calls: list[Call]) -> None:
        """Add calls that leave in x what is left of its values in `dtype`."""
        if x.dtype != dtype:
            rounded = self.of("rounded", x.shape[1], dtype)
            calls += [partial(rounded.copy_, x), partial(x.copy_, rounded)]
