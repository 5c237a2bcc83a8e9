"""Joining machines by hand: one opens a cluster and shows a token, the others join with it and number themselves."""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import base58
import msgpack

from hostring.errors import HandshakeError, RendezvousError
from hostring.store.client import StoreRefusedError, TcpStore
from hostring.store.server import StoreServer
from hostring.store.stores import Store
from hostring.transports.addresses import Address, hosts_to_bind, join_address
from hostring.transports.tcp import listen_at

_VERSION = 1
_SECRET_NBYTES = 16
_MOST_CHARACTERS = 1024
_PAUSE = 0.1

Progress = Callable[[dict[int, str], float], None]
"""Told who is here, by rank, and the seconds until the token expires."""


@dataclass(frozen=True)
class Token:
    """What a joining machine has to know.

    Attributes:
        addresses: where the cluster's store is, to be tried in turn.
        world_size: how many ranks belong together.
        expires: Unix time after which nobody may join.
        secret: shared by the group. The token is as secret as this is.
    """

    addresses: tuple[Address, ...]
    world_size: int
    expires: int
    secret: bytes = field(repr=False)

    def __str__(self) -> str:
        """Base58 with a checksum: no letters that look alike, and a mistyped one is noticed."""
        packed = msgpack.packb(
            [_VERSION, self.world_size, self.expires, self.secret, [list(a) for a in self.addresses]]
        )
        return base58.b58encode_check(packed).decode()

    @classmethod
    def parse(cls, text: str) -> Token:
        """Read a token.

        Raises:
            ValueError: it is mistyped, cut off, or of another version of hostring.
        """
        text = text.strip()
        if len(text) > _MOST_CHARACTERS:
            raise ValueError(f"a join token has at most {_MOST_CHARACTERS} characters, this has {len(text)}")
        try:
            fields = msgpack.unpackb(base58.b58decode_check(text), max_bin_len=64, max_str_len=256, max_array_len=32)
        except ValueError as exc:
            raise ValueError("this is no join token, or it is mistyped or cut off: its checksum is wrong") from exc
        if not isinstance(fields, list) or not fields or fields[0] != _VERSION:
            raise ValueError("this join token is of another version of hostring; use the same one on all machines")
        try:
            _, world_size, expires, secret, addresses = fields
            places = tuple((host, port) for host, port in addresses)
        except (ValueError, TypeError) as exc:
            raise ValueError("this join token is incomplete") from exc
        numbers = isinstance(world_size, int) and isinstance(expires, int) and isinstance(secret, bytes)
        if (
            not numbers
            or not places
            or not all(isinstance(h, str) and isinstance(p, int) and 0 < p < 1 << 16 for h, p in places)
        ):
            raise ValueError("this join token does not hold what it should")
        return cls(places, world_size, expires, secret)


@dataclass(frozen=True)
class Place:
    """What this machine is in the cluster. `rejoins` when it held this rank before."""

    token: Token
    address: Address
    rank: int
    rejoins: bool = False

    def environment(self) -> dict[str, str]:
        """The variables under which `hostring.init` finds the group. The secret is among them: never print them."""
        return {
            "RANK": str(self.rank),
            "WORLD_SIZE": str(self.token.world_size),
            "MASTER_ADDR": self.address[0],
            "MASTER_PORT": str(self.address[1]),
            "HOSTRING_STORE": join_address(*self.address),
            "HOSTRING_SECRET": self.token.secret.hex(),
            "HOSTRING_CLUSTER": "1",  # lets a program say how to come back
            **({"HOSTRING_REJOIN": "1"} if self.rejoins else {}),
        }


class Cluster:
    """The opening side: runs the store, is rank 0, and lets `world_size - 1` others join until the token expires.

    Args:
        hosts: addresses of this machine to offer; without, those that other machines can reach.
        port: where to listen; 0 takes a free one.
        lifetime: seconds until the token expires.
    """

    def __init__(
        self, world_size: int, *, name: str, hosts: Sequence[str] = (), port: int = 0, lifetime: float = 600.0
    ) -> None:
        if world_size < 2:
            raise ValueError(f"world_size={world_size}: a cluster has at least 2 ranks")
        secret = secrets.token_bytes(_SECRET_NBYTES)
        places = list(hosts) or hosts_to_bind(loopback=False, spec=os.environ.get("HOSTRING_INTERFACE"))
        sockets = [listen_at(places[0], port)]
        port = sockets[0].getsockname()[1]
        sockets += [listen_at(place, port) for place in places[1:]]
        self._server = StoreServer(sockets, secret.hex().encode())
        self.token = Token(tuple((place, port) for place in places), world_size, int(time.time() + lifetime), secret)
        self._store = TcpStore.at(places[0], port, secret=secret.hex().encode())
        _claim(self._store, name)

    @property
    def place(self) -> Place:
        return Place(self.token, self.token.addresses[0], 0)

    def wait(self, progress: Progress = lambda here, left: None) -> dict[int, str]:
        """Wait until all have joined. Returns their names by rank.

        Raises:
            RendezvousError: the token expired first. Names the ranks that are missing; nobody can join any more.
        """
        while True:
            here = _members(self._store, self.token.world_size)
            left = self.token.expires - time.time()
            progress(here, left)
            if len(here) == self.token.world_size:
                return here
            if left <= 0:
                self._store.set("cluster/closed", b"the token has expired")
                missing = [r for r in range(self.token.world_size) if r not in here]
                raise RendezvousError(
                    f"the token expired before all had joined: missing are ranks {', '.join(map(str, missing))}"
                )
            time.sleep(_PAUSE)

    def close(self) -> None:
        """End the store. Ranks that have found each other don't need it, but for rebuilding the group."""
        self._store.close()
        self._server.close()


def join(token: Token, name: str, *, rejoins: bool = False, timeout: float = 10.0) -> Place:
    """Take the next free rank of the cluster that `token` names.

    Args:
        name: of this machine, one per rank.
        rejoins: come back as the rank that `name` held.

    Raises:
        HandshakeError: the token has expired or is used up, or `name` has joined already (or, coming back, never did).
        RendezvousError: nobody answers at its addresses, or not with its secret.
    """
    if not rejoins and time.time() > token.expires:
        raise HandshakeError(
            f"this token expired {time.time() - token.expires:.0f} s ago; "
            f"ask for a new one (or set this machine's clock)"
        )
    failures: list[str] = []
    for host, port in token.addresses:
        deadline = time.monotonic() + timeout / len(token.addresses)
        store = TcpStore.at(host, port, secret=token.secret.hex().encode(), deadline=deadline)
        try:
            return Place(
                token, (host, port), _rank_again(store, name) if rejoins else _rank(store, token, name), rejoins
            )
        except StoreRefusedError as exc:
            raise HandshakeError(f"the cluster at {join_address(host, port)} does not know this token: {exc}") from exc
        except HandshakeError:
            raise
        except OSError as exc:
            failures.append(f"{join_address(host, port)}: {exc}")
        finally:
            store.close()
    raise RendezvousError(
        f"nobody answers at the token's addresses; is the cluster still open? ({'; '.join(failures)})"
    )


def _rank(store: Store, token: Token, name: str) -> int:
    if store.check(["cluster/closed"]):
        raise HandshakeError(store.get("cluster/closed", 1.0).decode())
    rank = _claim(store, name)
    if rank >= token.world_size:
        raise HandshakeError(f"this token is used up: all {token.world_size} ranks have joined")
    return rank


def _claim(store: Store, name: str) -> int:
    """The next rank, under `name`."""
    if store.add(f"cluster/names/{name}", 1) > 1:
        raise HandshakeError(
            f"a machine called {name!r} has joined already; give this one another --name, or come back as it by --again"
        )
    rank = store.add("cluster/ranks", 1) - 1
    store.set(f"cluster/ranks/{rank}", name.encode())
    store.set(f"cluster/rank-of/{name}", str(rank).encode())
    return rank


def _rank_again(store: Store, name: str) -> int:
    if not store.check([f"cluster/rank-of/{name}"]):
        raise HandshakeError(f"no machine called {name!r} has been in this cluster; join without --again")
    return int(store.get(f"cluster/rank-of/{name}", 1.0))


def _members(store: Store, world_size: int) -> dict[int, str]:
    return {
        r: store.get(f"cluster/ranks/{r}", 1.0).decode()
        for r in range(world_size)
        if store.check([f"cluster/ranks/{r}"])
    }
