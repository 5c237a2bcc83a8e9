"""Who has which rank of a cluster that is still open, as its store says.

A process claims the lowest free rank, under a name of its own, and shows signs of life while it waits for the others.
The rank of a process that left, or fell silent, is free again.
"""

from __future__ import annotations

from dataclasses import dataclass

from hostring.errors import HandshakeError
from hostring.group.pulse import Pulse
from hostring.store.stores import Store

SILENT_S = 5.0  # without a sign of life, after which a rank may be claimed by another process


@dataclass(frozen=True)
class Claim:
    """A process that has claimed a rank. `turn` tells it from those that had the rank before."""

    rank: int
    turn: int
    name: str


def take(store: Store, name: str, world_size: int) -> Claim:
    """The lowest free rank, under `name`.

    Raises:
        HandshakeError: nobody may join any more, there is no free rank, or `name` has one already.
    """
    if store.check(["cluster/closed"]):
        raise HandshakeError(store.get("cluster/closed", 1.0).decode())
    if store.add(f"cluster/names/{name}", 1) > 1:
        raise HandshakeError(
            f"a machine called {name!r} has joined already; give this one another --name, or come back as it by --again"
        )
    for rank in range(world_size):
        turn = store.add(f"cluster/turns/{rank}", 0)
        if store.add(f"cluster/taken/{rank}/{turn}", 1) == 1:
            store.set(f"cluster/rank-of/{name}", str(rank).encode())
            store.set(f"cluster/holder/{rank}/{turn}", name.encode())
            return Claim(rank, turn, name)
    store.add(f"cluster/names/{name}", -1)
    raise HandshakeError(f"this token is used up: all {world_size} ranks have joined")


def rank_of(store: Store, name: str) -> int:
    """The rank that `name` has or had.

    Raises:
        HandshakeError: none.
    """
    if not store.check([f"cluster/rank-of/{name}"]):
        raise HandshakeError(f"no machine called {name!r} has been in this cluster; join without --again")
    return int(store.get(f"cluster/rank-of/{name}", 1.0))


def holder(store: Store, rank: int) -> Claim | None:
    """Who has `rank` now."""
    turn = store.add(f"cluster/turns/{rank}", 0)
    key = f"cluster/holder/{rank}/{turn}"
    return Claim(rank, turn, store.get(key, 1.0).decode()) if store.check([key]) else None


def release(store: Store, claim: Claim) -> None:
    """Give the rank of `claim` up. Does nothing if that was done already."""
    if store.add(f"cluster/released/{claim.rank}/{claim.turn}", 1) == 1:
        store.delete(f"cluster/rank-of/{claim.name}")
        store.add(f"cluster/names/{claim.name}", -1)
        store.add(f"cluster/turns/{claim.rank}", 1)


def pulse(store: Store, claim: Claim) -> Pulse:
    """The signs of life of the process on `claim`."""
    return Pulse(store, f"cluster/alive/{claim.rank}/{claim.turn}", SILENT_S)
