"""The norm and the head over a few rows of the residual stream, as one graph."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from hostring.integrations.llm.packed.cache import POSITIONS_STEP
from hostring.integrations.llm.packed.decoder import PackedDecoder
from hostring.integrations.llm.packed.exchange import Exchange, rows_of
from hostring.integrations.llm.packed.graph import Backend
from hostring.integrations.llm.packed.memory import Arena
from hostring.integrations.llm.packed.regions import StepGraphs

MAX_KEPT = 4  # numbers of rows whose graphs are kept


class LastRows:
    """Logits by the blocks of the head: few rows don't pay for dequantising it."""

    def __init__(self, decoder: PackedDecoder) -> None:
        self._decoder = decoder
        self._kept: dict[int, _Graph] = {}

    def logits(self, rows: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
        """rows: shape (sequences, hidden). Returns shape (sequences, local vocabulary), valid until the next call."""
        if not self._decoder.n_logits:
            return np.empty((len(rows), 0), np.float32)
        graph = self._kept.pop(len(rows), None) or _Graph(self._decoder, len(rows))
        self._kept[len(rows)] = graph  # the latest last
        for oldest in list(self._kept)[:-MAX_KEPT]:
            del self._kept[oldest]
        return graph.run(rows)


class _Graph:
    def __init__(self, decoder: PackedDecoder, n_rows: int) -> None:
        local, arena = decoder.local, Arena(decoder.ggml)
        single = rows_of(((1, POSITIONS_STEP),) * n_rows)
        self._exchange = e = Exchange(arena, single, local.hidden_size, 1, 1, decoder.n_logits, decoder.n_head_rows)
        graphs = StepGraphs(arena, local, e, 1)
        graphs.end(decoder.norm, decoder.head)
        self._compute, backend = decoder.ggml.backend_graph_plan_compute, Backend(arena, decoder.threads)
        self._backend, (self._plan,) = backend.pointer, backend.plan(arena, graphs.graphs)

    def run(self, rows: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
        self._exchange.x[:] = rows
        self._compute(self._backend, self._plan)
        return self._exchange.logits
