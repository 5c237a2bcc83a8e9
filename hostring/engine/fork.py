"""What a forked child must do with the groups of its parent: neither use their links nor keep them open.

The links belong to both processes after a fork. A child that used them would mix its bytes into the parent's. A child
that merely lives on would hide the parent's death from the other ranks, because their streams would not end.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Iterable
from typing import Final, Protocol

from hostring.errors import GroupClosedError
from hostring.transports.link import Link


class Inherited(Protocol):
    """What belongs to the process that made it."""

    def leave_to_parent(self) -> None:
        """Called in a forked child."""


inherited: Final[weakref.WeakSet[Inherited]] = weakref.WeakSet()
"""Told in every child that is forked from now on. Groups add themselves."""


def refusal(rank: int) -> GroupClosedError:
    """What every call of the group raises in the child."""
    return GroupClosedError(
        f"this process was forked from that of rank {rank} and can't use its group; start processes by spawn instead "
        f"(for a data loader: multiprocessing_context='spawn'), or call hostring.init in the child"
    )


def release(links: Iterable[Link]) -> None:
    """Release the links of this process.

    Their descriptors stay taken by /dev/null, so that a late use hits nothing else.
    """
    null = os.open(os.devnull, os.O_RDWR)
    for link in links:
        if (fd := link.fileno()) >= 0:
            os.dup2(null, fd, inheritable=False)
    os.close(null)


def _in_child() -> None:
    for session in list(inherited):
        session.leave_to_parent()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_in_child)
