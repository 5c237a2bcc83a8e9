"""Forward passes of a rank with dequantised weights, by torch: on any device, in any dtype."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from hostring import Comm
from hostring.integrations.llm.model.cache import KVCache
from hostring.integrations.llm.model.local_model import Rows
from hostring.integrations.llm.model.one_row import OneRow
from hostring.integrations.llm.model.qwen import Decoder
from hostring.integrations.llm.model.shards import WHOLE, Boundaries, Ends
from hostring.integrations.llm.model.tensor_parallel import HiddenReducer

Stream = npt.NDArray[np.float32]


@dataclass
class ExactForward:
    """See `Forward`.

    Attributes:
        decoder: the local part; its head gives the logits of this rank's vocabulary rows.
        one_row: the short way for a single token, on CPUs; None elsewhere, and where the layers are compiled.
    """

    decoder: Decoder
    reducer: HiddenReducer
    dtype: torch.dtype
    device: torch.device
    reduced_elements: list[int]
    compiled: bool = False
    ends: Ends = WHOLE
    boundaries: Boundaries = field(default_factory=Boundaries, init=False)
    compute: str = field(default="exact", init=False)
    one_row: OneRow | None = field(init=False)

    def __post_init__(self) -> None:
        bound = self.device.type == "cpu" and not self.compiled
        self.one_row = OneRow(self.decoder, self.reducer) if bound else None

    @property
    def nbytes_held(self) -> int:
        """See `Forward`."""
        return sum(parameter.nbytes for parameter in self.decoder.parameters())

    def new_cache(self, batch: int, max_seq: int) -> KVCache:
        """See `Forward`. It holds values rounded to the rank's dtype; on a CPU in f32, whose attention kernel is five
        times slower in f16."""
        dtype = torch.float32 if self.device.type == "cpu" else self.dtype
        return KVCache(self.decoder.config, batch, max_seq, dtype, self.device)

    def move_to(self, comm: Comm) -> None:
        """See `Forward`."""
        self.reducer.comm = comm

    @torch.inference_mode()
    def step(self, tokens: Tensor, cache: Any, stream: Stream | None = None, every: bool = False) -> Tensor:
        """See `Forward.step`. tokens: shape (batch, seq). With `every`, logits of all tokens of the first sequence."""
        single = self.one_row if tokens.numel() == 1 else None
        run_layers = self.decoder.run_layers if single is None else single.run_layers
        h = self._watched(tokens, stream, lambda h: run_layers(h, cache))
        if not self.ends.head:
            return h[0]
        if single is not None:
            return single.logits(h)
        return self.decoder.logits(h)[0] if every else self.decoder.logits(h[:, -1:])[:, -1]

    @torch.inference_mode()
    def step_rows(self, rows: Rows, stream: Stream | None = None, every: bool = False) -> Tensor:
        """See `Forward.step_rows`."""
        tokens = torch.tensor([[token for _, ids in rows for token in ids]])
        if len(rows) == 1:
            return self.step(tokens, rows[0][0], stream, every)
        parts = [(cache, len(ids)) for cache, ids in rows]
        h = self._watched(tokens, stream, lambda h: self.decoder.run_sequences(h, parts))
        if not self.ends.head:
            return h[0]
        if every:
            return self.decoder.logits(h)[0]
        last = torch.tensor([end - 1 for end in accumulate(n for _, n in parts)], device=self.device)
        return self.decoder.logits(h[:, last])[0]

    def _watched(self, tokens: Tensor, stream: Stream | None, run_layers: Callable[[Tensor], Tensor]) -> Tensor:
        """The residual stream after the layers, from the embedding or from the stage before; the audit sees both."""
        audit, before = self.reducer.audit, None if stream is None else torch.from_numpy(stream)[None]
        h: Tensor = self.decoder.embed(tokens.to(self.device)) if before is None else before.to(self.device)
        if audit is not None:
            audit.begin(h)
        h = run_layers(h)
        if audit is not None:
            audit.end(h)
        return h
