"""What a rank must know before it can find the others, and where this is read from."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from hostring.group.environment import Launched, job_key, launched
from hostring.transports.addresses import split_address

if TYPE_CHECKING:
    from hostring.group.ring_file import Ring

MIN_SILENCE_S = 0.5  # less, and a busy machine loses ranks that are well


@dataclass(frozen=True)
class Config:
    """How one rank finds the others. Made by `from_environment`.

    Attributes:
        rank: this rank.
        world_size: number of ranks.
        name: of the group, part of every key in the store.
        topology, order, wire, transport: as in `hostring.init`.
        timeout: seconds for start-up, and for an operation unless it says otherwise.
        silence: seconds without a sign of life after which a rank counts as lost; None: nobody looks for signs.
        interface: which addresses to offer, see `hostring.transports.addresses.choose`.
        secret: shared by the group. Never logged.
        store_host, store_port: where the store is; None when the ranks meet in another way.
        hosts_store: rank 0 runs the store there. Otherwise somebody else does, for example `hostring launch`.
        torch_store: the store there is torch's.
        job: names the file through which rank 0 tells the store's address, when nobody gave one.
        store: a store that the caller brought, ours or torch's.
        ring: the neighbours, when there is no store at all.
        restarts: tells one start by the launcher from the next.
    """

    rank: int = 0
    world_size: int = 1
    name: str = "world"
    topology: str = "auto"
    order: str = "rank"
    wire: str = "float32"
    transport: str = "auto"
    timeout: float = 120.0
    silence: float | None = None
    interface: str | None = None
    secret: bytes = field(default=b"", repr=False)
    store_host: str | None = None
    store_port: int = 0
    hosts_store: bool = True
    torch_store: bool = False
    job: str | None = None
    store: Any = field(default=None, repr=False)
    ring: Ring | None = None
    restarts: str = "0"


def from_environment(
    rank: int | None = None,
    world_size: int | None = None,
    *,
    topology: str | None = None,
    order: str | None = None,
    wire: str | None = None,
    transport: str | None = None,
    timeout: float | None = None,
    silence: float | None = None,
    store: Any = None,
    environ: Mapping[str, str] = os.environ,
) -> Config:
    """Complete the caller's arguments from RING_CONFIG, else from the launcher's variables, else with a world of one.

    An argument wins over its variable: HOSTRING_TOPOLOGY, HOSTRING_ORDER, HOSTRING_WIRE, HOSTRING_TRANSPORT,
    HOSTRING_TIMEOUT, HOSTRING_SILENCE. None, and "auto" for topology and transport, leave the choice to the variable.
    HOSTRING_SECRET and HOSTRING_INTERFACE have no argument.

    Raises:
        ValueError: something is missing, ill-formed or contradictory; names the variable, or the file and key.
    """
    common: dict[str, Any] = {
        "topology": _chosen(topology, environ, "HOSTRING_TOPOLOGY", "auto"),
        "order": _chosen(order, environ, "HOSTRING_ORDER", "rank"),
        "wire": _chosen(wire, environ, "HOSTRING_WIRE", "float32"),
        "transport": _chosen(transport, environ, "HOSTRING_TRANSPORT", "auto"),
        "timeout": _seconds(timeout, environ),
        "silence": _silence(silence, environ),
        "interface": environ.get("HOSTRING_INTERFACE", "").strip() or None,
        "secret": environ.get("HOSTRING_SECRET", "").encode("utf-8", "surrogateescape"),  # the bytes in every locale
    }
    if (rank is None) != (world_size is None):
        raise ValueError(f"rank={rank} and world_size={world_size}: give both, or neither")
    path = environ.get("RING_CONFIG", "").strip()
    if path and store is None:
        return _ring(path, rank, world_size, common)
    place = _placed(rank, world_size, environ) or Launched("nothing", 0, 1)
    return Config(
        rank=place.rank,
        world_size=place.world_size,
        **common,
        **_store_place(place, store, environ),
    )


def started_as(environ: Mapping[str, str]) -> Launched | None:
    """This process's place, from RING_CONFIG or its launcher; None if it is to start ranks itself.

    Raises:
        ValueError: as `from_environment`.
    """
    path = environ.get("RING_CONFIG", "").strip()
    if not path:
        return launched(environ)
    from hostring.group.ring_file import read_ring

    rank, world_size, _ = read_ring(path)
    return Launched(f"RING_CONFIG={path}", rank, world_size)


def _ring(path: str, rank: int | None, world_size: int | None, common: dict[str, Any]) -> Config:
    from hostring.group.ring_file import read_ring  # few groups are rings of this kind

    place = read_ring(path)
    if rank is not None and (rank, world_size) != place[:2]:
        raise ValueError(
            f"rank={rank} and world_size={world_size} contradict RING_CONFIG={path}, "
            f"which has rank {place[0]} and world_size {place[1]}"
        )
    return Config(rank=place[0], world_size=place[1], ring=place[2] if place[1] > 1 else None, **common)


def _placed(rank: int | None, world_size: int | None, environ: Mapping[str, str]) -> Launched | None:
    if rank is None or world_size is None:
        return launched(environ)
    if world_size < 1 or not 0 <= rank < world_size:
        raise ValueError(f"rank={rank} is not in 0…{world_size - 1} (world_size={world_size})")
    known = {name: environ[name] for name in ("LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT") if name in environ}
    return launched({**known, "RANK": str(rank), "WORLD_SIZE": str(world_size)})


def _store_place(place: Launched, store: Any, environ: Mapping[str, str]) -> dict[str, Any]:
    """Where the store is."""
    if store is not None or place.world_size == 1:
        return {
            "store": store,
            "store_host": _address("MASTER_ADDR", place.host, place.port)[0] if place.host else None,
        }
    run = f"{environ.get('TORCHELASTIC_RUN_ID', '')}.{environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"
    if environ.get("HOSTRING_STORE", "").strip():
        host, port = _address("HOSTRING_STORE", environ["HOSTRING_STORE"])
        return {"store_host": host, "store_port": port, "hosts_store": False}
    if place.host is not None:
        host, _ = _address("MASTER_ADDR", place.host, place.port)
        agent = environ.get("TORCHELASTIC_USE_AGENT_STORE", "").lower() == "true"
        return {
            "store_host": host,
            "store_port": place.port,
            "torch_store": agent,
            "hosts_store": not agent,
            "restarts": run,
        }
    if place.one_host and place.job:
        return {"job": job_key(place.job)}
    raise ValueError(
        f"{place.by} says that this is rank {place.rank} of {place.world_size}, but nothing says where the ranks meet; "
        f"set MASTER_ADDR (and MASTER_PORT) on all of them to an address of rank 0's host"
    )


def _address(variable: str, text: str, port: int | None = None) -> tuple[str, int]:
    try:
        return split_address(text, port)
    except ValueError as exc:
        raise ValueError(f"{variable}={text!r}: {exc}; expected HOST:PORT, such as 192.168.77.1:9002") from None


def _chosen(argument: str | None, environ: Mapping[str, str], variable: str, default: str) -> str:
    if argument is not None and argument != "auto":
        return argument
    return environ.get(variable, "").strip() or argument or default


def _silence(argument: float | None, environ: Mapping[str, str]) -> float | None:
    text = environ.get("HOSTRING_SILENCE", "").strip() or "0"
    try:
        seconds = float(text) if argument is None else float(argument)
    except ValueError:
        raise ValueError(f"HOSTRING_SILENCE={text!r} is not a number of seconds") from None
    if seconds and not MIN_SILENCE_S <= seconds < math.inf:
        name = "HOSTRING_SILENCE" if argument is None else "silence"
        raise ValueError(f"{name}={seconds:g} is not {MIN_SILENCE_S:g} seconds or more; 0 looks for no signs of life")
    return seconds or None


def _seconds(argument: float | None, environ: Mapping[str, str]) -> float:
    if argument is None:
        text = environ.get("HOSTRING_TIMEOUT", "").strip() or "120"
        try:
            seconds = float(text)
        except ValueError:
            raise ValueError(f"HOSTRING_TIMEOUT={text!r} is not a number of seconds") from None
        name = "HOSTRING_TIMEOUT"
    else:
        seconds, name = float(argument), "timeout"
    if not seconds > 0 or math.isinf(seconds):
        raise ValueError(f"{name}={seconds} is not a positive number of seconds")
    return seconds
