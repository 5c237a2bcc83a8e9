"""How long the shards of a layer stay unresolved: operations and time between two reductions.

A layer has two such spans: from the norm to the attention output, and from the norm to the MLP output. The longer a
span in operations, the less often ranks wait for each other; the longer in time, the less the waiting weighs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from hostring.integrations.llm.model.local_model import LocalModel

_VIEWS = (
    "view",
    "transpose",
    "permute",
    "slice",
    "select",
    "split",
    "unbind",
    "expand",
    "t.",
    "detach",
    "alias",
    "as_strided",
    "reshape",
)


@dataclass(frozen=True)
class Span:
    """One stretch between reductions.

    Attributes:
        layer: which.
        region: "attention" or "mlp".
        operations: torch operations of `Decoder.forward` that compute; views and casts that move nothing are not
            counted.
        seconds: the median over the steps that were measured; on an accelerator, of the time until they are queued.
    """

    layer: int
    region: str
    operations: int
    seconds: float


class _Counting(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.operations = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.__name__
        self.operations += not name.startswith(_VIEWS)
        return func(*args, **(kwargs or {}))


class _Boundaries:
    """Stands in for the group while it is measured: notes when each reduction begins and ends."""

    def __init__(self, model: LocalModel, counting: _Counting | None) -> None:
        self.comm, self.counting = model.comm, counting
        self.spans: list[float] = []
        self.operations: list[int] = []
        self._since, self._counted = perf_counter(), 0

    def all_reduce(self, x: Any) -> Any:
        self.spans.append(perf_counter() - self._since)
        if self.counting is not None:
            self.operations.append(self.counting.operations - self._counted)
        self.comm.all_reduce(x)
        self._counted = 0 if self.counting is None else self.counting.operations
        self._since = perf_counter()
        return x


def measure_spans(model: LocalModel, prompt: Sequence[int], steps: int = 8) -> list[Span]:
    """Decode a few tokens and report every span. A collective: every rank calls it with the same arguments.

    Args:
        prompt: ids that fill the KV cache first.
        steps: decode steps to take the median of; one more counts the operations.

    Raises:
        ValueError: the embedding is split too: its reduction belongs to no layer.
    """
    if len(model.forward.reduced_elements) != 2 * model.config.num_hidden_layers:
        raise ValueError("spans are measured with replicate_embedding=True")
    cache = model.new_cache()
    model.step(torch.tensor([list(prompt)]), cache)
    token = torch.tensor([[prompt[-1]]], device=model.forward.device)
    counted = _one_step(model, token, cache, _Counting()).operations
    timed = [_one_step(model, token, cache, None).spans for _ in range(steps)]
    medians = [sorted(seconds)[steps // 2] for seconds in zip(*timed, strict=True)]
    return [Span(i // 2, ("attention", "mlp")[i % 2], counted[i], medians[i]) for i in range(len(medians))]


def _one_step(model: LocalModel, token: Tensor, cache: Any, counting: _Counting | None) -> _Boundaries:
    boundaries = _Boundaries(model, counting)
    model.reducer.comm = boundaries
    try:
        if counting is None:
            model.step(token, cache)
        else:
            with counting:
                model.decoder(
                    token, cache, last_only=True
                )  # `step` fuses some, and torch doesn't see what it leaves to numpy
    finally:
        model.reducer.comm = model.comm
    return boundaries


def boundary_bytes(hidden_size: int, n_layers: int, n_tokens: int = 1, itemsize: int = 4) -> int:
    """Bytes of hidden state that one forward pass brings to its reductions: two per layer, `n_tokens` rows each.

    What a rank sends is this times what the schedule says, such as (N-1) or 2(N-1)/N.
    """
    return 2 * n_layers * n_tokens * hidden_size * itemsize
