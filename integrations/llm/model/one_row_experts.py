"""The experts of a layer, for one row: see `one_row.py`."""

from __future__ import annotations

from functools import partial
from typing import cast

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hostring.integrations.llm.model.qwen import ExpertsWeights
from hostring.integrations.llm.model.row_buffers import RowBuffers
from hostring.integrations.llm.model.tensor_parallel import Call, ColumnParallelLinear, RowParallelLinear


def gate_call(gate_up: Tensor, gated: Tensor) -> Call:
    """A call that writes silu(gate) * up into `gated`, in their dtype. gate_up: (1, 2 columns); gated: (1, columns)."""
    gate, up = gate_up.chunk(2, 1)
    if gate.dtype == torch.float32:
        multiply = partial(np.multiply, gate.numpy(), up.numpy(), out=gated.numpy())
    else:
        multiply = partial(torch.mul, gate, up, out=gated)

    def apply() -> None:
        F.silu(gate, inplace=True)
        multiply()

    return apply


class RowExperts:
    """Routes one row and adds its experts up, one after another in rising order. Each is bound in advance.

    Args:
        side: weights of the region. norm: which gives x.
        h, x: the stream and its norm, shape (1, hidden).
        buffers: scratch, which all experts share.
    """

    def __init__(self, side: ExpertsWeights, norm: nn.Module, h: Tensor, x: Tensor, buffers: RowBuffers) -> None:
        self._router, self._norm, self._h, self._x = side.router, norm, h, x
        self._product = buffers.of("product", h.shape[1])
        self._experts = [self._bound(expert, buffers) for expert in side.experts]
        self._shared = [] if side.shared is None else self._bound(side.shared, buffers)
        self._chosen: list[tuple[list[Call], float]] = []

    def route(self) -> None:
        """Choose the experts of this step."""
        routes = self._router(self._h, self._x, self._norm)
        weights = routes.weights[0].tolist()
        chosen, here = zip(routes.experts[0].tolist(), weights, strict=True), self._router.mixture.here
        self._chosen = [(self._experts[n - here.start], weight) for n, weight in chosen if n in here]
        if routes.shared is not None:
            self._chosen.append((self._shared, routes.shared.item()))

    def mix_into(self, total: npt.NDArray[np.float32]) -> None:
        """Write this rank's part of the weighted sum into `total`, shape (hidden,)."""
        total[:] = 0.0
        product = self._product.numpy()[0]
        for calls, weight in self._chosen:
            for call in calls:
                call()
            np.multiply(product, np.float32(weight), out=product)
            np.add(total, product, out=total)

    def _bound(self, expert: nn.Module, buffers: RowBuffers) -> list[Call]:
        """Calls that write what an expert gives into `_product`."""
        first = cast(ColumnParallelLinear, expert.get_submodule("gate_up_proj"))
        last = cast(RowParallelLinear, expert.get_submodule("down_proj"))
        n_rows, dtype = first.weight.shape[0], first.weight.dtype
        gate_up, gated = buffers.of("gate_up", n_rows, dtype), buffers.of("gated", n_rows // 2, dtype)
        calls = [*first.bind(self._x, gate_up, buffers.of("rounded x", self._x.shape[1], dtype))]
        calls.append(gate_call(gate_up, gated))
        buffers.round(gated, last.dtype, calls)
        wide = buffers.widened(gated, calls)
        return [*calls, *last.bind(wide, self._product)]
