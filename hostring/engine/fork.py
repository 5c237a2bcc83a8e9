"""What a forked child must do with the groups of its parent: neither use their links nor keep them open.

The links belong to both processes after a fork. A child that used them would mix its bytes into the parent's, and one that
merely lives on would hide the parent's death from the other ranks, which see it by the end of the stream.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Iterable
from typing import Any

from hostring.errors import GroupClosedError
from hostring.transports.link import Link

_groups: weakref.WeakSet[Any] = weakref.WeakSet()


def watch(group: Any) -> None:
    """Call `group.forsake()` in every child that is forked from now on."""
    _groups.add(group)


def refusal(rank: int) -> GroupClosedError:
    """What every call of the group raises in the child."""
    return GroupClosedError(
        f"this process was forked from that of rank {rank} and can't use its group; start processes by spawn instead "
        f"(for a data loader: multiprocessing_context='spawn'), or call hostring.init in the child"
    )


def let_go(links: Iterable[Link]) -> None:
    """Give up this process's hold on the links' descriptors. Their numbers stay taken, so that whoever knows them does no harm."""
    null = os.open(os.devnull, os.O_RDWR)
    for link in links:
        if (fd := link.fileno()) >= 0:
            os.dup2(null, fd, inheritable=False)
    os.close(null)


def _in_child() -> None:
    for group in list(_groups):
        group.forsake()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_in_child)
