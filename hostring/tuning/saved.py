"""Where the table of a group is saved. Every group looks there when it starts, so this imports nothing heavy."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path

from hostring.engine.session import Session


def tuning_path(session: Session) -> Path:
    """The file for groups like this one: by hosts, transport and world size, in the user's cache directory."""
    group = session.group
    stacks: dict[str, int] = {}
    who = [
        (m.hostname, stacks.setdefault(m.net_id, len(stacks))) if m is not None else ("?", -1) for m in group.peer_infos
    ]
    key = json.dumps([who, group.config.transport, session.tuner.topology.name])
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return cache / "hostring" / f"tuning-{session.world_size}-{hashlib.sha256(key.encode()).hexdigest()[:16]}.json"
