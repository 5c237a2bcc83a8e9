"""Steps of two ranks that both hold the whole model: one computes prompts, the other decodes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from hostring import Comm
from hostring.integrations.llm.handover.blocks import BlockFormat, laid_out
from hostring.integrations.llm.handover.cache import HandedCache
from hostring.integrations.llm.handover.handing import Handing
from hostring.integrations.llm.handover.roles import Roles
from hostring.integrations.llm.model.cache import check_fit
from hostring.integrations.llm.model.local_model import LocalModel, Rows
from hostring.integrations.llm.model.regions import Attention, layers_of
from hostring.integrations.llm.model.shards import WHOLE, Boundaries, Ends
from hostring.integrations.llm.model.tensor_parallel import HiddenReducer
from hostring.integrations.llm.packed.model import PackedForward

Stream = npt.NDArray[np.float32]
MAX_CATCH_UP_ROWS = 512  # tokens that the other rank decoded, in one forward pass


@dataclass
class HandoverForward:
    """See `Forward`.

    Several rows of a sequence are computed by the prefill rank, which sends keys and values of each layer while it
    computes the next one; a single row is computed by the decode rank alone. Who computed has the logits of all the
    vocabulary, the other one has none.

    Attributes:
        inner: the whole model, on this rank alone.
        comm: the group of both ranks. roles: who does what.
        forms: how the keys and values of each rank travel.
        reducer: of the group, in which nothing is added up; with the clock and the audit of `inner`.
    """

    inner: LocalModel
    comm: Comm
    roles: Roles
    forms: Sequence[BlockFormat]
    reducer: HiddenReducer
    compute: str = field(init=False)
    dtype: torch.dtype = field(init=False)
    device: torch.device = field(init=False)
    compiled: bool = field(init=False)
    decoder: Any = field(init=False)
    boundaries: Boundaries = field(default_factory=Boundaries, init=False)
    ends: Ends = field(default=WHOLE, init=False)
    reduced_elements: list[int] = field(default_factory=list, init=False)
    handing: Handing = field(init=False)

    def __post_init__(self) -> None:
        forward = self.inner.forward
        self.compute, self.dtype, self.device = forward.compute, forward.dtype, forward.device
        self.compiled, self.decoder = forward.compiled, forward.decoder
        n_layers = self.inner.config.num_hidden_layers
        self.handing = Handing(self.comm, self.roles, self.forms[self.roles.prefill], n_layers)
        if isinstance(forward, PackedForward) and self.handing.prefills:
            forward.show_sums()

    @property
    def nbytes_held(self) -> int:
        """See `Forward`."""
        return self.inner.forward.nbytes_held

    def move_to(self, comm: Comm) -> None:
        """See `Forward`."""
        self.comm = self.reducer.comm = comm
        self.handing.move_to(comm)

    def new_cache(self, batch: int, max_seq: int) -> HandedCache:
        """See `Forward`.

        Raises:
            ValueError: more than one sequence.
        """
        if batch != 1:
            raise ValueError(f"a cache that is handed over holds one sequence, not {batch}; make one for each")
        return HandedCache(self.inner.forward.new_cache(1, max_seq))

    def step(self, tokens: Tensor, cache: HandedCache, stream: Stream | None = None) -> Tensor:
        """See `Forward.step`. The rank that does not compute returns logits of shape (1, 0)."""
        n_rows = tokens.numel()
        check_fit(cache, n_rows)
        self.handing.computed_here = self.handing.prefills == (n_rows > 1)
        if n_rows == 1:
            found = self._decode([(cache, tokens.view(-1).tolist())])
        elif self.handing.prefills:
            found = self._prefill(tokens, cache)
        else:
            found = self._take(n_rows, cache)
        cache.length += n_rows
        return found

    def step_rows(self, rows: Rows, stream: Stream | None = None, every: bool = False) -> Tensor:
        """See `Forward.step_rows`. Logits that the other rank has are minus infinity here.

        Raises:
            ValueError: the logits of every row are asked for.
        """
        if every:
            raise ValueError("with prefill=RANK,decode=RANK a step gives the logits of last rows only; don't speculate")
        found = torch.full((len(rows), self.inner.config.vocab_size), -torch.inf, device=self.device)
        single = [n for n, (_, ids) in enumerate(rows) if len(ids) == 1]
        if single:
            logits = self._decode([rows[n] for n in single])
            if logits.numel():
                found[single] = logits
            for n in single:
                rows[n][0].length += 1
        for n, (cache, ids) in enumerate(rows):
            if len(ids) > 1 and (logits := self.step(torch.tensor([list(ids)]), cache)).numel():
                found[n] = logits[0]
        return found

    def _decode(self, rows: Rows) -> Tensor:
        """Single rows, on the rank that decodes; the other one notes what it does not have."""
        if not self.handing.prefills:
            return self.inner.forward.step_rows([(cache.held, ids) for cache, ids in rows])
        for cache, ids in rows:
            cache.missing += ids
        return torch.empty(1, 0)

    def _prefill(self, tokens: Tensor, cache: HandedCache) -> Tensor:
        """Compute a chunk, and send every layer's keys and values as soon as they are there."""
        sender, held = self.handing.sender, cache.held
        while cache.missing:
            ids, cache.missing = cache.missing[:MAX_CATCH_UP_ROWS], cache.missing[MAX_CATCH_UP_ROWS:]
            with _Sums(self.inner, lambda layer: None):
                self.inner.forward.step(torch.tensor([ids], device=self.device), held)
            sender.figures.caught_up += len(ids)
        start, stop = cache.length, cache.length + tokens.numel()

        def computed(layer: int) -> None:
            sender.send(layer, start, held.rows(layer, start, stop))

        with _Sums(self.inner, computed):
            found = self.inner.forward.step(tokens, held)
        sender.figures.rows += tokens.numel()
        return found

    def _take(self, n_rows: int, cache: HandedCache) -> Tensor:
        """Receive what the other rank computes of a chunk."""
        start, held, clock = cache.length, cache.held, self.reducer.clock
        theirs, ours = self.forms[self.roles.prefill], self.forms[self.comm.rank]

        def store(layer: int, kv: Tensor) -> None:
            held.rows(layer, start, start + n_rows).copy_(laid_out(kv, theirs, ours))

        clock.stop()
        self.handing.receiver.receive(self.inner.config.num_hidden_layers, start, n_rows, store)
        clock.start()
        self.handing.receiver.figures.rows += n_rows
        held.length = start + n_rows
        return torch.empty(1, 0)


class _Sums:
    """While it is entered, stands where a group adds up the sums of a step, and tells when a layer has its keys and
    values."""

    def __init__(self, model: LocalModel, computed: Callable[[int], None]) -> None:
        self._reducer, self._computed = model.reducer, computed
        kinds = [(n, region) for n, regions in enumerate(layers_of(model.config)) for region in regions]
        self._layers = [n if isinstance(region, Attention) else None for n, region in kinds]
        self._done = 0

    def __enter__(self) -> None:
        self._group, self._reducer.comm = self._reducer.comm, self

    def __exit__(self, *exc: object) -> None:
        self._reducer.comm = self._group

    def all_reduce(self, x: Any, /) -> Any:
        """The sum of this rank alone is x."""
        layer, self._done = self._layers[self._done], self._done + 1
        if layer is not None:
            self._computed(layer)
        return x
