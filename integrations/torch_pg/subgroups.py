"""`split_group`: a group of some of the ranks. The others need not call it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch._C import _distributed_c10d as c10d

from hostring.integrations.torch_pg.calls import Calls, Timeout


class Subgroups:
    """Makes groups of some of the ranks of a group.

    Args:
        connect: as in `new_group`.
    """

    def __init__(self, calls: Calls, store: Any, connect: Callable[..., Any]) -> None:
        self._calls, self._comm, self._store, self._connect = calls, calls.comm, store, connect

    def split(self, ranks: Sequence[int], timeout: Timeout, opts: Any, name: str | None, desc: str | None) -> Any:
        """A group of `ranks` of this one, with links of its own; None for a rank that is not among them."""
        if self._comm.rank not in ranks:
            return None
        store = c10d.PrefixStore(f"{name or ','.join(map(str, ranks))}/", self._store)
        options = self._comm if opts is None else opts  # its topology, order and wire are this group's
        rank = sorted(ranks).index(self._comm.rank)
        child = self._connect(store, rank, len(ranks), timeout or self._calls.default_timeout, options)
        child.setGroupName(name or "")
        child.setGroupDesc(desc or "")
        return child
