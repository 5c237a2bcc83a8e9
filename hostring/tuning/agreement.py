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

from hostring.arrays.dtypes import BY_NAME
from hostring.engine.choice import Choice, Table, Threshold, default_table
from hostring.engine.frames import START_SEQ
from hostring.engine.sending import Buffers
from hostring.errors import HostringError
from hostring.tuning.tables import Tuning, load, tuning_path

if TYPE_CHECKING:
    from hostring.comm import Comm

_RECORD_NBYTES: Final = 4096  # one broadcast, whatever was decided
_Plain: TypeAlias = "dict[str, list[tuple[int, str, str, int]]]"  # a table as msgpack takes it


def agree(comm: Comm) -> None:
    """Give all ranks the table that rank 0 decides on. Called once, before the first call; costs one small broadcast.

    Raises:
        HostringError: the group failed, or rank 0 could not read the tuning that it was told to.
    """
    if comm.world_size == 1:
        return
    comm._seq = START_SEQ
    record, tuning = np.zeros(_RECORD_NBYTES, np.uint8), None
    if comm.rank == 0:
        *decision, tuning = _decide(comm)
        packed = msgpack.packb(decision)
        record[: len(packed)] = np.frombuffer(packed, np.uint8)
    program = comm._planner.movement("broadcast", record.size, BY_NAME["uint8"], 0)
    comm._run(program, Buffers(record, record[:0]), None, perf_counter())
    unpacker = msgpack.Unpacker()
    unpacker.feed(record.tobytes())
    what, source, table = unpacker.unpack()
    if what == "trouble":
        raise HostringError(source, 0)
    _adopt(comm, {c: [Threshold(*t) for t in thresholds] for c, thresholds in table.items()}, source)
    if what == "measure":
        from hostring.tuning.trial import tune

        share(comm, tune(comm, measured=False))
    elif comm.rank == 0:
        _explain(comm, tuning)
    comm._seq = 0
    comm.counters.forget()
    comm.recorder.forget()


def share(comm: Comm, tuning: Tuning) -> None:
    """Use what rank 0 holds in `tuning` from now on, on all ranks. The others' `tuning` is ignored."""
    packed = msgpack.packb(_plain(tuning.table(comm._tuner))) if comm.rank == 0 else b""
    nbytes = np.array([len(packed)], np.int64)
    comm.broadcast(nbytes)
    record = np.frombuffer(packed, np.uint8).copy() if comm.rank == 0 else np.zeros(int(nbytes[0]), np.uint8)
    comm.broadcast(record)
    table = {c: [Threshold(*t) for t in thresholds] for c, thresholds in msgpack.unpackb(record.tobytes()).items()}
    _adopt(comm, table, tuning.source)
    if comm.rank == 0:
        _explain(comm, tuning)


def _adopt(comm: Comm, table: Table, source: str) -> None:
    comm._planner.drop()
    comm._tuner.adopt(table, source)


def _plain(table: Table) -> _Plain:
    return {
        c: [(t.upto, t.topology, t.variant, t.segment_nbytes) for t in thresholds] for c, thresholds in table.items()
    }


def _decide(comm: Comm) -> tuple[str, str, _Plain, Tuning | None]:
    """("table", "measure" or "trouble"; where it is from, or what is wrong; the table; what it was made of)."""
    wanted = os.environ.get("HOSTRING_TUNING", "").strip() or "auto"
    tuner = comm._tuner
    tuning = None
    try:
        if wanted not in ("off", "measure", "auto"):
            tuning = load(Path(wanted))
        elif wanted == "auto" and (path := tuning_path(comm)).exists():
            tuning = load(path)
        if tuning is not None and tuning.network.world_size != comm.world_size:
            raise ValueError(f"it is of {tuning.network.world_size} ranks, this group has {comm.world_size}")
    except (OSError, ValueError) as exc:
        return "trouble", f"HOSTRING_TUNING={wanted}: {exc}", {}, None
    if tuning is not None:
        return "table", tuning.source, _plain(tuning.table(tuner)), tuning
    near = _one_host(comm)
    table = default_table(tuner.rules, tuner.order, comm.world_size, one_host=near)
    what = "measure" if wanted == "measure" else "table"
    return what, f"the defaults for {'one host' if near else 'a network'}", _plain(table), None


def _one_host(comm: Comm) -> bool:
    """Whether all ranks are known to be on one network stack."""
    stacks = {m.net_id if m is not None else None for m in comm._group.members}
    return len(stacks) == 1 and None not in stacks


def _explain(comm: Comm, tuning: Tuning | None) -> None:
    """With HOSTRING_TRACE=1, rank 0 says once for each collective and size what was chosen, and why."""
    if os.environ.get("HOSTRING_TRACE") != "1":
        return

    def explain(collective: str, nbytes: int, choice: Choice) -> None:
        tuner = comm._tuner
        costs = tuning.reasons(collective, nbytes, tuner.allowed[collective]) if tuning is not None else []
        known = "".join(f"; {name} {seconds * 1e6:.1f} us" for name, seconds in costs[:6])
        ruled = (
            f"; topology={comm.topology!r} leaves {len(tuner.allowed[collective])}"
            if collective in tuner.rules.ways
            else ""
        )
        print(
            f"hostring: {collective} of {nbytes} bytes goes by {choice.name}: {tuner.source}{ruled}{known}",
            file=sys.stderr,
            flush=True,
        )

    comm._tuner.explain = explain
