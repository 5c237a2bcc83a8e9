"""`split_group`: a group of some of the ranks. The others need not call it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch._C import _distributed_c10d as c10d

from hostring.integrations.torch_pg.calls import Calls, Timeout
from hostring.integrations.torch_pg.islands.choice import Choice, read


class Subgroups:
    """Makes groups of some of the ranks of a group.

    Args:
        connect: as in `new_group`.
        choice: which islands were asked for.
        names: the ranks' numbers in the whole world.
    """

    def __init__(
        self, calls: Calls, store: Any, connect: Callable[..., Any], choice: Choice | None, names: Sequence[int]
    ) -> None:
        self._calls, self._comm, self._store, self._connect = calls, calls.comm, store, connect
        self._choice, self._names = choice, names

    def split(self, ranks: Sequence[int], timeout: Timeout, opts: Any, name: str | None, desc: str | None) -> Any:
        """A group of `ranks` of this one, with links of its own; None for a rank that is not among them."""
        if self._comm.rank not in ranks:
            return None
        store = c10d.PrefixStore(f"{name or ','.join(map(str, ranks))}/", self._store)
        options = self._comm if opts is None else opts  # its topology, order and wire are this group's
        rank, limit = sorted(ranks).index(self._comm.rank), timeout or self._calls.default_timeout
        islands = self._choice if opts is None else read(opts) or self._choice
        names = [self._names[r] for r in sorted(ranks)]
        child = self._connect(store, rank, len(ranks), limit, options, islands, names)
        child._set_group_name(name or "")  # noqa: SLF001 - torch's name for it
        child._set_group_desc(desc or "")  # noqa: SLF001 - torch's name for it
        return child
