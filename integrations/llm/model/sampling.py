"""Choosing the next token: every rank brings its best candidates, the head rank alone decides."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

MAX_LIKELY = 2048  # ids that are sorted first: a draw rarely goes beyond, and sorting 150,000 takes 20 ms
GO_ON, STOP_EOS, STOP_LENGTH, NOT_FINITE = range(4)


@dataclass(frozen=True)
class Sampling:
    """How to choose.

    Attributes:
        temperature: 0 takes the most likely token (the lowest id where several tie).
        top_k: choose among this many of the most likely ones; 0 for all.
        top_p: choose among the most likely ones that together have this probability.
        seed: of the head rank's random numbers.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        if not self.temperature >= 0:
            raise ValueError(f"temperature {self.temperature} is negative; use 0 for greedy decoding")
        if self.top_k < 0:
            raise ValueError(f"top_k {self.top_k} is negative; use 0 for all tokens")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p {self.top_p} is not in (0, 1]; use 1 for all tokens")

    @property
    def greedy(self) -> bool:
        return self.temperature == 0

    def candidates(self, largest_shard: int) -> int:
        """How many candidates each rank must bring for the choice to be exact.

        Args:
            largest_shard: vocabulary rows of the rank that has most of them.
        """
        wanted = 1 if self.greedy else self.top_k or largest_shard
        return min(wanted, largest_shard)


def local_candidates(logits: Tensor, n_candidates: int, first: int) -> npt.NDArray[np.int32]:
    """The best of this rank's logits with their ids; ties go to lower ids.

    Args:
        logits: shape (local vocabulary,), f32, on any device.
        n_candidates: how many; what the shard can't fill is padded with −inf and id −1, which is never chosen.
        first: id of the first logit.

    Returns:
        shape (2, n_candidates): the bits of the f32 values, and the ids. NaN ranks above everything.
    """  # noqa: RUF002
    found = np.full((2, n_candidates), -1, np.int32)
    values = found[0].view(np.float32)
    values.fill(-np.inf)
    count = min(n_candidates, logits.numel())
    if not logits.is_cpu:
        if count < logits.numel():
            found[:, :count] = _best(logits, count).numpy()
            found[1, :count] += first
            return found
        logits = logits.cpu()
    if n_candidates == 1 and count:
        row = logits.numpy()  # whose argmax takes a tenth of torch's time
        best = int(row.argmax())
        values[0], found[1, 0] = row[best], first + best
    elif count == logits.numel():
        values[:count] = logits.numpy()
        found[1, :count] = np.arange(first, first + count)
    else:
        worst = torch.topk(logits, count).values[-1]
        chosen = torch.nonzero(~(logits < worst)).view(-1).numpy()
        kept = logits.numpy()[chosen]
        order = np.argsort(-np.where(np.isnan(kept), np.inf, kept), kind="stable")[:count]
        values[:count], found[1, :count] = kept[order], first + chosen[order]
    return found


def _best(logits: Tensor, count: int) -> Tensor:
    """Bits and indices of the largest, shape (2, count), on the host: one copy, so that the device is waited for
    once."""
    if count == 1:
        values, indices = logits.max(0, keepdim=True)
    else:
        values, indices = (found[:count] for found in logits.sort(descending=True, stable=True))
    return torch.stack((values.view(torch.int32), indices.to(torch.int32))).cpu()


class Sampler:
    """The head rank's choice. Depends on the logits and on the seed, not on how the vocabulary is split."""

    def __init__(self, sampling: Sampling) -> None:
        self.sampling = sampling
        self._random = np.random.Generator(np.random.PCG64(sampling.seed))

    def choose(self, stacked: npt.NDArray[np.int32]) -> int | None:
        """Pick an id.

        Args:
            stacked: what `local_candidates` gave on every rank, shape (world_size, 2, n_candidates).

        Returns:
            the id, or None when the largest logit is not a finite number.
        """
        return self.pick(np.ascontiguousarray(stacked[:, 0]).view(np.float32).ravel(), stacked[:, 1].ravel())

    def pick(self, values: npt.NDArray[np.float32], ids: npt.NDArray[np.int32]) -> int | None:
        """`choose` among logits and their ids, each of shape (n,); ids below 0 stand for nothing."""
        real = (ids >= 0) & ~np.isneginf(values)  # rows without a token have -inf
        values, ids = values[real], ids[real]
        if not values.size or not np.isfinite(values.max()):  # NaN counts as the largest
            return None
        if self.sampling.greedy:
            return int(ids[values.argmax()])  # the first of equals: ranks, and ids within a rank, are in order
        if self.sampling.top_k:
            order = np.lexsort((ids, -values))[: self.sampling.top_k]
            values, ids = values[order], ids[order]
        weights = np.exp((values.astype(np.float64) - values.max()) / self.sampling.temperature)
        chances, drawn, top_p = weights / weights.sum(), self._random.random(), self.sampling.top_p
        n = MAX_LIKELY
        cumulative, ranked = _ranked(values, ids, chances, n)
        while len(ranked) < len(values) and not (cumulative[-1] > drawn if top_p == 1 else cumulative[-1] >= top_p):
            n *= 8
            cumulative, ranked = _ranked(values, ids, chances, n)
        if top_p < 1:
            cumulative = cumulative[: int(np.searchsorted(cumulative, top_p)) + 1]
            drawn *= cumulative[-1]
        return int(ranked[min(int(np.searchsorted(cumulative, drawn, side="right")), len(cumulative) - 1)])


def _ranked(
    values: npt.NDArray[np.float32], ids: npt.NDArray[np.int32], chances: npt.NDArray[np.float64], n: int
) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.int32]]:
    """Cumulative chances of the `n` largest values, and of all that are equal to the last of them; and their ids."""
    if n < len(values):
        first = np.flatnonzero(values >= np.partition(values, len(values) - n)[len(values) - n])
        values, ids, chances = values[first], ids[first], chances[first]
    order = np.lexsort((ids, -values))
    return np.cumsum(chances[order]), ids[order]
