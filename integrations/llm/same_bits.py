"""The promise of one answer for any number of ranks: made by all ranks when they load, or refused by name.

It needs packed compute on every rank, whose partial sums are made per unit and folded in an order that the model fixes
(`packed/`), by kernels whose bits depend on neither the shard nor the rows beside a row. So all ranks must have the
same release of these kernels, on the same instruction set, and sums must travel unrounded.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from importlib.metadata import version
from typing import Any

import numpy as np
import numpy.typing as npt
from torch import Tensor

from hostring import Comm
from hostring.integrations.llm.model.shards import ShardPlan
from hostring.integrations.llm.model.tensor_parallel import gather_logits
from hostring.integrations.llm.packed.library import PACKAGE, load
from hostring.integrations.llm.request import HEAD_RANK

OnLogits = Callable[[npt.NDArray[np.float32]], None]
"""Called with the logits of each step, shape (1, vocabulary), on the head rank."""

INSTEAD = "use a GGUF file and --compute packed on every rank, or leave --same-bits out"


def promise(comm: Comm, why_not_packed: str) -> None:
    """Agree that these ranks give the bits of any other number of ranks. A collective.

    Args:
        why_not_packed: why this rank does not compute packed; empty when it does.

    Raises:
        ValueError: it can't be held; says which rank can't, and why. On every rank.
    """
    refused = b""
    told = comm.gather_bytes(json.dumps(_means(why_not_packed)).encode())
    if comm.rank == HEAD_RANK:
        refused = _refusal([json.loads(one) for one in told], comm.wire).encode()
    if refusal := comm.broadcast_bytes(refused, root=HEAD_RANK).decode():
        raise ValueError(refusal)


def _means(why_not_packed: str) -> dict[str, Any]:
    """What this rank computes with."""
    if why_not_packed:
        return {"why_not": why_not_packed}
    return {"why_not": "", "kernels": f"{PACKAGE} {version(PACKAGE)}", "instructions": load().instructions()}


def _refusal(ranks: list[dict[str, Any]], wire: str) -> str:
    """Why these ranks can't hold the promise; empty when they can."""
    if wire != "float32":
        return (
            f"same bits can't be promised: the group rounds what travels to {wire}, and what travels depends on the "
            "number of ranks; use wire float32"
        )
    for rank, means in enumerate(ranks):
        if means["why_not"]:
            return (
                f"same bits can't be promised: rank {rank} computes exact, and its sums depend on its share of the "
                f"model ({means['why_not']}); {INSTEAD}"
            )
        for what in ("kernels", "instructions"):
            if means[what] != ranks[0][what]:
                return (
                    f"same bits can't be promised: rank {rank} has the {what} {_words(means[what])}, rank 0 has "
                    f"{_words(ranks[0][what])}; use machines and releases that are alike"
                )
    return ""


def _words(what: str | list[str]) -> str:
    return what if isinstance(what, str) else " ".join(what)


class LogitsHash:
    """Hashes the logits of every step, in f32 and in the order of the vocabulary, on the head rank.

    Its cost is one gather of the vocabulary per step, 4 bytes each, and the hash of it.

    Attributes:
        gathered_elements: what each rank brings to the gather for each row of a step.
    """

    def __init__(self, comm: Comm, plan: ShardPlan, on_logits: OnLogits | None = None) -> None:
        self._comm, self._plan, self._on_logits = comm, plan, on_logits
        self._hash, self.gathered_elements = hashlib.sha256(), max(plan.vocab)
        self._gathered: npt.NDArray[np.float32] | None = None

    def gather(self, logits: Tensor) -> None:
        """One step's logits, shape (rows, local vocabulary). A collective."""
        self._gathered = gather_logits(self._comm, logits, self._plan, HEAD_RANK)

    def add(self, n_rows: int) -> None:
        """So many rows of those count; the others followed a wrong guess."""
        if self._gathered is None:
            return
        for row in self._gathered[:n_rows, None]:
            self._hash.update(row.data)
            if self._on_logits is not None:
                self._on_logits(row)

    @property
    def sha256(self) -> str | None:
        """Of all steps so far; None on other ranks than the head."""
        return self._hash.hexdigest() if self._comm.rank == HEAD_RANK else None
