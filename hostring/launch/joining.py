"""The joining side of a cluster: takes a rank with a token, and waits until all others have joined as well."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from hostring.errors import HandshakeError, RendezvousError
from hostring.launch import claims, discovery
from hostring.launch.token import Token
from hostring.store.client import StoreRefusedError, TcpStore
from hostring.transports.addresses import Address, join_address, with_own_scopes

PAUSE_S = 0.1  # between two looks at the store
JOB_KEY = "cluster/job"


@dataclass(frozen=True)
class Place:
    """What this machine is in the cluster.

    Attributes:
        rejoins: it had this rank before.
        claim: how it shows that it is still there; None for a machine that rejoins or has opened the cluster.
    """

    token: Token
    address: Address
    rank: int
    rejoins: bool = False
    claim: claims.Claim | None = field(default=None, repr=False)

    def environment(self) -> dict[str, str]:
        """The variables under which `hostring.init` finds the group. The secret is among them: never print them."""
        return {
            "RANK": str(self.rank),
            "WORLD_SIZE": str(self.token.world_size),
            "MASTER_ADDR": self.address[0],
            "MASTER_PORT": str(self.address[1]),
            "HOSTRING_STORE": join_address(*self.address),
            "HOSTRING_SECRET": self.token.secret.hex(),
            "HOSTRING_CLUSTER": ",".join(host for host, _ in self.token.addresses),  # also says: how to come back
            **({"HOSTRING_REJOIN": "1"} if self.rejoins else {}),
        }


def offered_hosts(environ: Mapping[str, str]) -> list[str]:
    """Addresses by which the others reach the machine that opened the cluster, where this is that machine."""
    offered = filter(None, environ.get("HOSTRING_CLUSTER", "").split(","))
    return [host for one in offered for host in with_own_scopes(one)]


def join(token: Token, name: str, *, rejoins: bool = False, timeout: float = 10.0) -> Place:
    """Take the next free rank of the cluster that `token` names, or come back as the rank that this machine had.

    Args:
        name: of this machine, one per rank.
        rejoins: come back as the rank that `name` had.

    Raises:
        HandshakeError: the token has expired or is used up, or `name` has joined already (or, coming back, never did).
        RendezvousError: nobody answers at its addresses, or not with its secret.
    """
    if not rejoins:
        _check_alive(token)

    def enter(store: TcpStore, address: Address) -> Place:
        if rejoins:
            return Place(token, address, claims.rank_of(store, name), rejoins)
        claim = claims.take(store, name, token.world_size)
        return Place(token, address, claim.rank, claim=claim)

    return _at_the_store(token, enter, timeout)


def join_or_come_back(token: Token, name: str, *, was_here: bool, timeout: float = 10.0) -> Place:
    """Take the next free rank, or, where the cluster is complete and `name` has a rank, come back as that.

    Args:
        was_here: this machine has been in the cluster, so that the token may have expired since.

    Raises:
        HandshakeError, RendezvousError: see `join`.
    """
    if not was_here:
        _check_alive(token)

    def enter(store: TcpStore, address: Address) -> Place:
        if store.check(["cluster/complete", f"cluster/rank-of/{name}"]):
            return Place(token, address, claims.rank_of(store, name), rejoins=True)
        claim = claims.take(store, name, token.world_size)
        return Place(token, address, claim.rank, claim=claim)

    return _at_the_store(token, enter, timeout)


def _check_alive(token: Token) -> None:
    if time.time() > token.expires:
        raise HandshakeError(
            f"this token expired {time.time() - token.expires:.0f} s ago; "
            f"ask for a new one (or set this machine's clock)"
        )


def _at_the_store(token: Token, enter: Callable[[TcpStore, Address], Place], timeout: float) -> Place:
    """What `enter` does at the store of the cluster, which is at one of the token's addresses, or where it is announced
    since."""
    addresses = [(host, port) for offered, port in token.addresses for host in with_own_scopes(offered)]
    failures: list[str] = []
    entered = _at_one_of(addresses, token, enter, timeout, failures)
    if entered is None:
        elsewhere = [address for address in discovery.found(token.secret) if address not in addresses]
        entered = _at_one_of(elsewhere, token, enter, timeout, failures)
    if entered is None:
        raise RendezvousError(
            f"nobody answers at the token's addresses, and nobody announces this cluster elsewhere on the local "
            f"network; is it still open? ({'; '.join(failures)})"
        )
    return entered


def _at_one_of(
    addresses: Sequence[Address],
    token: Token,
    enter: Callable[[TcpStore, Address], Place],
    timeout: float,
    failures: list[str],
) -> Place | None:
    """What `enter` does at the first of these addresses where the store answers; None where nobody does, see
    `failures`."""
    for address in addresses:
        store = _store(token, address, time.monotonic() + timeout / len(addresses))
        try:
            return enter(store, address)
        except StoreRefusedError as exc:
            raise HandshakeError(f"the cluster at {join_address(*address)} does not know this token: {exc}") from exc
        except HandshakeError:
            raise
        except OSError as exc:
            failures.append(f"{join_address(*address)}: {exc}")
        finally:
            store.close()
    return None


def job_of(place: Place) -> bytes | None:
    """What the head wants this machine to run; None where it leaves that to the machine.

    Raises:
        ConnectionError: the head is gone.
    """
    store = _store(place.token, place.address, time.monotonic() + claims.SILENT_S)
    try:
        return store.get(JOB_KEY, 1.0) if store.check([JOB_KEY]) else None
    finally:
        store.close()


def _store(token: Token, address: Address, deadline: float = 0.0) -> TcpStore:
    return TcpStore.at(*address, secret=token.secret.hex().encode(), deadline=deadline)


def wait_for_all(place: Place, progress: Callable[[float], None] = lambda left: None) -> None:
    """Keep the rank of `place`, and wait until all have joined, for as long as the token lives.

    A rank is given up when this ends in any other way, so that another machine can have it.

    Args:
        progress: called often, with the seconds until the token expires.

    Raises:
        HandshakeError: the token expired first, or this machine was silent for so long that it lost its rank.
        RendezvousError: the machine that opened the cluster is gone.
    """
    if place.claim is None:
        return
    store = _store(place.token, place.address, time.monotonic() + claims.SILENT_S)
    try:
        store.reach()
        store.deadline = 0.0
        _wait(store, place.token, place.claim, progress)
    except HandshakeError:
        raise
    except ConnectionError as exc:
        if time.time() >= place.token.expires:
            raise HandshakeError("the token expired before all had joined") from exc
        raise RendezvousError(f"the machine that opened the cluster is gone: {exc}", 0) from exc
    except BaseException:  # Ctrl-C
        with contextlib.suppress(OSError):
            claims.release(store, place.claim)
        raise
    finally:
        store.close()


def _wait(store: TcpStore, token: Token, claim: claims.Claim, progress: Callable[[float], None]) -> None:
    pulse = claims.pulse(store, claim)
    while not store.check(["cluster/complete"]):
        if store.check(["cluster/closed"]):
            raise HandshakeError(store.get("cluster/closed", 1.0).decode())
        if claims.holder(store, claim.rank) != claim:
            raise HandshakeError(
                f"this machine was silent for more than {claims.SILENT_S:.0f} s and lost rank {claim.rank}; join again"
            )
        pulse.beat()
        progress(token.expires - time.time())
        time.sleep(PAUSE_S)
    with contextlib.suppress(ConnectionError):
        store.add("cluster/started", 1)  # the store may go now
