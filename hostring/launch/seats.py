"""Who has which rank of a cluster that is still open, as its store says.

A rank is a seat. A process takes the lowest free one, under a name of its own, and shows signs of life while it waits
for the others. A seat whose process left, or fell silent, is free again.
"""

from __future__ import annotations

from dataclasses import dataclass

from hostring.errors import HandshakeError
from hostring.group.pulse import Pulse
from hostring.store.stores import Store

SILENT_S = 5.0  # without a sign of life, after which a seat is given to somebody else


@dataclass(frozen=True)
class Seat:
    """One process on one rank. `turn` tells it from those that had the rank before."""

    rank: int
    turn: int
    name: str


def take(store: Store, name: str, world_size: int) -> Seat:
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
            return Seat(rank, turn, name)
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


def holder(store: Store, rank: int) -> Seat | None:
    """Who has `rank` now."""
    turn = store.add(f"cluster/turns/{rank}", 0)
    key = f"cluster/holder/{rank}/{turn}"
    return Seat(rank, turn, store.get(key, 1.0).decode()) if store.check([key]) else None


def release(store: Store, seat: Seat) -> None:
    """Make `seat` free again. Does nothing if it is free already."""
    if store.add(f"cluster/released/{seat.rank}/{seat.turn}", 1) == 1:
        store.delete(f"cluster/rank-of/{seat.name}")
        store.add(f"cluster/names/{seat.name}", -1)
        store.add(f"cluster/turns/{seat.rank}", 1)


def pulse(store: Store, seat: Seat) -> Pulse:
    """The signs of life of the process on `seat`."""
    return Pulse(store, f"cluster/alive/{seat.rank}/{seat.turn}", SILENT_S)
