"""The flight recorder: the last operations of a group, what they were, how long they took, and on whom they waited."""

from __future__ import annotations

import logging
import os
import time
from collections import deque
from collections.abc import Iterable
from pathlib import Path
from time import perf_counter
from typing import Any, Final

from hostring.arrays.dtypes import NAMES
from hostring.engine.frames import Call
from hostring.topologies import schedule_name

log = logging.getLogger("hostring")

KEPT: Final = 1000
_EPOCH: Final = time.time() - perf_counter()  # what turns a perf_counter time into one that other machines know

Entry = tuple[tuple[Call, str], int, float, float, float, float, int, tuple[int, int]]
"""What it was (see `Program.subject`), seq, started, ended, seconds of waiting and of folding, the rank of the longest
wait, and (payload bytes sent, received)."""


class Recorder:
    """Keeps the last `KEPT` operations. Recording costs one append; words are made when somebody asks.

    With `HOSTRING_DEBUG=1` each operation is also logged as it ends. With `HOSTRING_DUMP=DIR` the record is written to
    `DIR/hostring-GROUP-RANK.json` when the group fails or is closed.
    """

    def __init__(self, group: str, rank: int, world_size: int) -> None:
        self.group, self.rank, self.world_size = group, rank, world_size
        self._entries: deque[Entry] = deque(maxlen=KEPT)
        self.record = self._entries.append
        if os.environ.get("HOSTRING_DEBUG") == "1":
            logging.basicConfig(level=logging.INFO, format="%(message)s")
            self.record = self._record_and_log
        self._directory = os.environ.get("HOSTRING_DUMP")
        self._failure: str | None = None

    def _record_and_log(self, entry: Entry) -> None:
        self._entries.append(entry)
        row = _row(entry)
        log.info(
            "hostring: rank %d %s #%d %s x %d in %.1f us (waited %.1f us for rank %s)",
            self.rank,
            row["collective"],
            row["seq"],
            row["dtype"],
            row["n_elements"],
            row["seconds"] * 1e6,
            row["wait"] * 1e6,
            row["waited_for"],
        )

    def forget(self) -> None:
        """Drop what was recorded so far."""
        self._entries.clear()

    def rows(self) -> list[dict[str, Any]]:
        """The operations as plain dicts, oldest first. Times are seconds; `started` is since the Unix epoch."""
        return [_row(entry) for entry in list(self._entries)]

    def document(self) -> dict[str, Any]:
        """Everything as one JSON-able dict."""
        group = {"group": self.group, "rank": self.rank, "world_size": self.world_size}
        return {**group, "failure": self._failure, "operations": self.rows()}

    def dump(self, failure: str | None = None) -> Path | None:
        """Write the document into `HOSTRING_DUMP`, where that is set.

        Returns the file. The first failure is remembered.
        """
        self._failure = self._failure or failure
        if self._directory is None:
            return None
        import json  # for failed groups and those that are watched: takes longer to import than this file

        path = Path(self._directory) / f"hostring-{self.group.replace('/', '_')}-{self.rank}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(self.document()), encoding="utf-8")
        log.info("hostring: rank %d wrote its last %d operations to %s", self.rank, len(self._entries), path)
        return path


def _row(entry: Entry) -> dict[str, Any]:
    (call, dtype), seq, started, ended, waiting, folding, waited_for, (sent, received) = entry
    return {
        "seq": seq,
        "collective": call.collective,
        "op": call.op,
        "n_elements": call.n_elements,
        "dtype": NAMES[call.kind] if call.kind < len(NAMES) else dtype,
        "schedule": schedule_name(call.schedule),
        "sent": sent,
        "received": received,
        "started": _EPOCH + started,
        "seconds": ended - started,
        "wait": waiting,
        "fold": folding,
        "waited_for": None if waited_for < 0 else waited_for,
    }


def chrome_trace(documents: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """The records of several ranks as one trace for chrome://tracing or Perfetto.

    Each rank is a process there, each operation a slice.
    """
    events: list[dict[str, Any]] = []
    for document in documents:
        pid = document["rank"]
        name = f"rank {pid} of {document['world_size']}" + (f": {document['failure']}" if document["failure"] else "")
        events.append({"ph": "M", "pid": pid, "tid": 0, "name": "process_name", "args": {"name": name}})
        for row in document["operations"]:
            common = {"ph": "X", "pid": pid, "tid": 0, "cat": document["group"]}
            start = row["started"] * 1e6
            events.append({**common, "name": row["collective"], "ts": start, "dur": row["seconds"] * 1e6, "args": row})
            if row["wait"] > 0:
                waited = f"wait for rank {row['waited_for']}"
                events.append({**common, "name": waited, "ts": start, "dur": row["wait"] * 1e6, "args": {}})
    return {"traceEvents": events, "displayTimeUnit": "ms"}
