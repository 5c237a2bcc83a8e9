"""One rank's part of the model, with a KV cache for each slot, and how it computes a step's rows."""

from __future__ import annotations

import json
import platform
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from hostring import Comm
from hostring.integrations.llm.compute import stay
from hostring.integrations.llm.demo.planned import plan_together
from hostring.integrations.llm.generate import Model, load_model
from hostring.integrations.llm.model.cache import Cache
from hostring.integrations.llm.model.devices import find_device
from hostring.integrations.llm.model.sampling import local_candidates
from hostring.integrations.llm.request import HEAD_RANK
from hostring.integrations.llm.serve.options import ServeOptions
from hostring.integrations.llm.serve.steps import FROM_PROMPT, Admission, Brought, Feed, Row, brought_of, plan_width
from hostring.integrations.llm.serve.supply import OwnModel, Supply
from hostring.integrations.llm.serve.window import Step, StepWindow


@dataclass
class _Slot:
    """A KV cache and the sequence that has it.

    Attributes:
        ids: of the prompt, from the first that is not in the cache on. fed: how many of them have been fed since.
        keep: positions of the cache that stay, before the first of them is fed; then None.
    """

    cache: Cache
    ids: tuple[int, ...] = ()
    fed: int = 0
    n_candidates: int = 1
    every: bool = False
    keep: int | None = None


class RankPart:
    """What a rank computes with.

    Attributes:
        model: its part of the model; moves to another group when that is rebuilt.
    """

    def __init__(self, options: ServeOptions, comm: Comm, device: str, supply: Supply | None = None) -> None:
        self._device = find_device(device)
        self._supply: Supply = supply or OwnModel()
        self._options = self._agreed(options, comm)
        self._guesses = 0  # the most of a row
        self.model: Model = self._load(comm)
        self._speculate()
        self._slots: dict[int, _Slot] = {}

    @property
    def comm(self) -> Comm:
        return self.model.comm

    @property
    def load_wait_s(self) -> float:
        """How long ranks wait at least for those that still load: a short timeout is meant for steps."""
        return self._supply.load_wait_s

    @property
    def computes_in(self) -> str:
        """For people: "packed", or the dtype."""
        forward = self.model.sharded.forward
        return "packed" if forward.compute == "packed" else str(forward.dtype).removeprefix("torch.")

    def _agreed(self, options: ServeOptions, comm: Comm, loaded: bool = False) -> ServeOptions:
        """`options` with what must be the same on all ranks: the head's limits, and one plan. A collective."""
        limits = {"streams": options.streams, "context": options.context, "groups": options.groups}
        about = {**limits, "supply": self._supply.told()}
        told = json.loads(comm.broadcast_bytes(json.dumps(about).encode(), root=HEAD_RANK))
        supply, job = told.pop("supply"), options.job
        if not loaded:
            job = replace(job, model=self._supply.path(job.model, supply, comm.rank))
        return replace(options, **told, job=plan_together(job, comm, self._device, loaded))

    def _speculate(self) -> None:
        """Guess tokens, where the head wants that. A collective."""
        wish = self._options.job.speculation
        self.model.speculate(wish)
        most = self.comm.broadcast_bytes(bytes([wish.most if wish.on else 0]), root=HEAD_RANK)
        self._guesses = most[0]

    def _load(self, comm: Comm) -> Model:
        job = self._options.job
        return load_model(
            job.model,
            comm,
            dtype=job.dtypes[comm.rank],
            device=self._device,
            compute=job.compute,
            plan=job.split,
            same_bits=job.same_bits,
            max_seq=self._options.context,
        )

    def move_to(self, comm: Comm) -> None:
        """Go on in a rebuilt group. Every KV cache is forgotten: ranks may have stopped at different positions."""
        self._slots.clear()
        self._options = self._agreed(self._options, comm, loaded=True)
        if (comm.rank, comm.world_size) == (self.comm.rank, self.comm.world_size):
            self.model.packed_ranks = stay(self.model.sharded, comm, self._options.job.same_bits)
        else:
            self.model = self._load(comm)
        self._speculate()

    def admit(self, admission: Admission) -> None:
        """A sequence takes a slot."""
        slot = self._slots.get(admission.slot)
        if slot is None:
            slot = self._slots[admission.slot] = _Slot(self.model.sharded.new_cache())
        slot.keep, slot.ids, slot.fed = admission.keep, admission.ids, 0
        slot.n_candidates, slot.every = admission.n_candidates, admission.every

    @property
    def plan_width(self) -> int:
        """Numbers that a plan takes."""
        return plan_width(self._options.streams, self._guesses)

    @property
    def groups(self) -> int:
        """Of texts, whose steps are under way at the same time: one for each stage, or as many as the head allows."""
        stages = self.model.sharded.forward.boundaries.stages
        return min(self._options.groups or stages, stages)

    def window(self) -> StepWindow:
        """For a loop of steps that begins."""
        crossed = self.model.sharded.forward.boundaries
        crossed.in_background = self.groups > 1
        return StepWindow(self.groups, crossed.stage, crossed.stages)

    def prepare(self, rows: Sequence[Row]) -> Step:
        """What the rows of a step feed. To be called for each step as it is decided, before the next is."""
        return tuple(self._feed(row) for row in rows)

    def _feed(self, row: Row) -> Feed:
        slot = self._slots[row.slot]
        keep, slot.keep = slot.keep, None
        if row.token != FROM_PROMPT:
            return Feed(row.slot, (row.token, *row.guesses), slot.n_candidates, row.start, row.positions)
        slot.fed += row.positions
        chosen = slot.every or slot.fed == len(slot.ids)
        ids = slot.ids[slot.fed - row.positions : slot.fed]
        return Feed(row.slot, ids, slot.n_candidates if chosen else 0, keep)

    def run(self, mine: Step, oldest: Step) -> npt.NDArray[np.int32]:
        """Compute `mine`.

        Returns:
            what this rank brings to the decision after `oldest`; see `brought_of`. All ranks bring as much.
        """
        logits = self._logits(mine) if mine else None
        parts = brought_of(oldest)
        used = parts[-1].stop if parts else 0
        found = np.zeros(max(used, 1), np.int32)
        if logits is not None and mine is oldest:
            of_feeds = torch.split(logits, [feed.choices for feed in mine])
            chosen = [rows for feed, rows in zip(mine, of_feeds, strict=True) if feed.n_candidates]
            for part, rows in zip(parts, chosen, strict=True):
                found[part.start : part.stop] = np.concatenate(
                    [self._candidates(row, part.count).ravel() for row in rows]
                )
        else:
            found[:used] = _nothing(parts)
        return found

    def _logits(self, step: Step) -> Tensor:
        """This rank's logits of each row's last position, or of all of them where guesses are checked, shape
        (positions, local vocabulary)."""
        feeds = []
        for feed in step:
            cache = self._slots[feed.slot].cache
            if feed.keep is not None:
                cache.truncate(feed.keep)
            feeds.append((cache, feed.ids))
        every = any(feed.choices > 1 for feed in step)
        if len(feeds) > 1 or every:
            return self.model.sharded.step_rows(feeds, every)
        cache, tokens = feeds[0]
        return self.model.sharded.step(torch.tensor([tokens]), cache)

    def _candidates(self, logits: Tensor, n_candidates: int) -> npt.NDArray[np.int32]:
        if self.model.sharded.deciding is not None and (not logits.numel() or logits.max() == -torch.inf):
            return local_candidates(logits[:0], n_candidates, 0)  # another rank has computed this row
        unknown = self.model.rows_without_token
        known = logits if unknown is None else logits.index_fill(0, unknown, -torch.inf)
        first = self.model.sharded.plan.vocab_of(self.comm.rank).start
        return local_candidates(known, n_candidates, first)

    def report(self) -> dict[str, Any]:
        """What this rank is, and what it has done so far: counters only ever grow."""
        part = self.model.sharded
        counters = part.counts()
        rank, plan = self.comm.rank, part.plan
        device = str(part.forward.device)
        who = {"rank": rank, "device": device, "dtype": self.computes_in, "host": platform.node()}
        kv_bytes = sum(_nbytes(slot.cache) for slot in self._slots.values())
        held = {"bytes_held": part.forward.nbytes_held, "kv_bytes": kv_bytes, "arrived": self._supply.counts()}
        share = {"kv_groups": len(plan.groups_of(rank)), "columns": len(plan.columns_of(rank))}
        share["vocab"] = len(plan.vocab_of(rank))
        seconds = {**counters["seconds"], "compute": part.reducer.clock.seconds}
        links = {peer: link["payload_sent"] for peer, link in counters["links"].items()}
        waited = {"waited_for": counters["waited_for"]}
        return {**who, **held, **waited, "share": share, "seconds": seconds, "sent": links}


def _nbytes(cache: Cache) -> int:
    return int(getattr(cache, "nbytes", 0))


def _nothing(parts: Sequence[Brought]) -> npt.NDArray[np.int32]:
    """What a rank brings that has computed another step: candidates that stand for no token."""
    found = [np.full((2, part.count), -1, np.int32) for part in parts for _ in range(part.choices)]
    for one in found:
        one[0].view(np.float32).fill(-np.inf)
    return np.concatenate([one.ravel() for one in found]) if found else np.empty(0, np.int32)
