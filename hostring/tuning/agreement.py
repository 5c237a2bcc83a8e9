"""How all ranks come to use the same table of thresholds: rank 0 decides, once, when the group starts.

HOSTRING_TUNING of rank 0 says where from: "auto" (the default) is what `hostring tune` saved for these hosts, "measure"
measures the links at start, "off" leaves it at the defaults, anything else is a file that `hostring tune` wrote.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Final, TypeAlias

import msgpack
import numpy as np

from hostring.engine.binding import Buffers
from hostring.engine.choice import Choice, Table, Threshold
from hostring.engine.exchange import Patience
from hostring.engine.frames import START_SEQ
from hostring.engine.movements import Movements
from hostring.engine.session import Session
from hostring.errors import HostringError
from hostring.group.group import Group
from hostring.topologies.collectives import WHOLE, broadcast
from hostring.topologies.routes import Place
from hostring.tuning.defaults import default_table
from hostring.tuning.saved import tuning_path

if TYPE_CHECKING:
    from hostring.tuning.tables import Tuning

RECORD_NBYTES: Final = 4096  # one broadcast, whatever was decided
_Plain: TypeAlias = "dict[str, list[tuple[int, str, str, int]]]"  # a table as msgpack takes it


def open_session(group: Group, topology: str, order: str, wire: str, timeout: float) -> Session:
    """A session over the links of `group`, with a table that its ranks agree on. Every rank of the group calls this."""
    session = Session(group, topology=topology, order=order, wire=wire, timeout=timeout)
    try:
        agree(session)
        group.watch(session)
    except BaseException as exc:
        session.abort(f"it could not start: {exc}")
        raise
    return session


def agree(session: Session) -> None:
    """Give all ranks the table that rank 0 decides on. Called once, before the first call; costs one small broadcast.

    Raises:
        HostringError: the group failed, or rank 0 could not read the tuning that it was told to.
    """
    if session.world_size == 1:
        return
    session.seq = START_SEQ
    record, tuning = np.zeros(RECORD_NBYTES, np.uint8), None
    if session.rank == 0:
        *decision, tuning = _decide(session)
        packed = msgpack.packb(decision)
        record[: len(packed)] = np.frombuffer(packed, np.uint8)
    place = Place(session.rank, session.world_size, session.tuner.topology.next_hop)
    schedule = broadcast(place, record.size, WHOLE, 0)
    program = session.planner.probe(schedule, 0, record.dtype)
    patience, session.engine.patience = session.engine.patience, Patience(0, 0)  # rank 0 reads files meanwhile
    session.run(program, Buffers(record, record[:0]), None, perf_counter(), count=False)
    session.engine.patience = patience
    unpacker = msgpack.Unpacker()
    unpacker.feed(record.tobytes())
    what, source, table = unpacker.unpack()
    if what == "trouble":
        raise HostringError(source, 0)
    _adopt(session, table, source)
    if what == "measure":
        from hostring.tuning.trial import tune

        share(session, tune(session, measured=False))
    elif session.rank == 0:
        _explain(session, tuning)
    session.seq = 0  # the calls are counted from here on
    session.counters.forget()
    session.recorder.forget()


def share(session: Session, tuning: Tuning) -> None:
    """Use what rank 0 holds in `tuning` from now on, on all ranks. The others' `tuning` is ignored."""
    packed = msgpack.packb(_plain(tuning.table(session.tuner))) if session.rank == 0 else b""
    table = msgpack.unpackb(Movements(session).broadcast_bytes(packed, 0))
    session.planner.drop()
    _adopt(session, table, tuning.source)
    if session.rank == 0:
        _explain(session, tuning)


def _adopt(session: Session, table: _Plain, source: str) -> None:
    session.tuner.adopt({c: [Threshold(*t) for t in thresholds] for c, thresholds in table.items()}, source)


def _plain(table: Table) -> _Plain:
    return {
        c: [(t.upto, t.topology, t.variant, t.segment_nbytes) for t in thresholds] for c, thresholds in table.items()
    }


def _decide(session: Session) -> tuple[str, str, _Plain, Tuning | None]:
    """("table", "measure" or "trouble"; where it is from, or what is wrong; the table; what it was made of)."""
    wanted = os.environ.get("HOSTRING_TUNING", "").strip() or "auto"
    tuner = session.tuner
    tuning = None
    try:
        if wanted not in ("off", "measure", "auto"):
            tuning = _loaded(Path(wanted))
        elif wanted == "auto" and (path := tuning_path(session)).exists():
            tuning = _loaded(path)
        if tuning is not None and tuning.network.world_size != session.world_size:
            raise ValueError(f"it is of {tuning.network.world_size} ranks, this group has {session.world_size}")
    except (OSError, ValueError) as exc:
        return "trouble", f"HOSTRING_TUNING={wanted}: {exc}", {}, None
    near = _one_host(session)
    table = default_table(tuner.allowed, session.world_size, one_host=near or tuning is not None, wire=session.wire)
    if tuning is not None:
        return "table", tuning.source, _plain({**table, **tuning.table(tuner)}), tuning
    what = "measure" if wanted == "measure" else "table"
    return what, f"the defaults for {'one host' if near else 'a network'}", _plain(table), None


def _loaded(path: Path) -> Tuning:
    from hostring.tuning.tables import load  # with the cost model, which a group without a saved table doesn't need

    return load(path)


def _one_host(session: Session) -> bool:
    """Whether all ranks are known to be on one network stack."""
    stacks = {m.net_id if m is not None else None for m in session.group.peer_infos}
    return len(stacks) == 1 and None not in stacks


def _explain(session: Session, tuning: Tuning | None) -> None:
    """With HOSTRING_TRACE=1, print once for each collective and size what was chosen, and why. For rank 0."""
    if os.environ.get("HOSTRING_TRACE") != "1":
        return

    def explain(collective: str, nbytes: int, choice: Choice) -> None:
        tuner = session.tuner
        costs = tuning.reasons(collective, nbytes, tuner.allowed[collective]) if tuning is not None else []
        known = "".join(f"; {name} {seconds * 1e6:.1f} us" for name, seconds in costs[:6])
        ruled = (
            f"; topology={session.topology!r} leaves {len(tuner.allowed[collective])}"
            if collective in tuner.rules.ways
            else ""
        )
        print(
            f"hostring: {collective} of {nbytes} bytes goes by {choice.name}: {tuner.source}{ruled}{known}",
            file=sys.stderr,
            flush=True,
        )

    session.tuner.explain = explain
