"""Forward passes of a rank with dequantised weights, by torch: on any device, in any dtype."""

from __future__ import annotations

from dataclasses import dataclass, field

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
    def step(self, tokens: Tensor, cache: KVCache, stream: npt.NDArray[np.float32] | None = None) -> Tensor:
        """See `Forward.step`. tokens: shape (batch, seq)."""
        audit = self.reducer.audit
        h: Tensor = (
            self.decoder.embed(tokens.to(self.device))
            if stream is None
            else torch.from_numpy(stream)[None].to(self.device)
        )
        if audit is not None:
            audit.begin(h)
        single = self.one_row if tokens.numel() == 1 else None
        h = self.decoder.run_layers(h, cache) if single is None else single.run_layers(h, cache)
        if audit is not None:
            audit.end(h)
        if not self.ends.head:
            return h[0]
        return self.decoder.logits(h[:, -1:])[:, -1] if single is None else single.logits(h)

    def step_rows(self, rows: Rows, stream: npt.NDArray[np.float32] | None = None) -> Tensor:
        """One sequence after another: torch's kernels give a row other bits beside other rows."""
        found, start = [], 0
        for cache, ids in rows:
            stop = start + len(ids)
            found.append(self.step(torch.tensor([list(ids)]), cache, None if stream is None else stream[start:stop]))
            start = stop
        return torch.cat(found)
