"""Who starts a lost rank again, in words: the launcher that said so, or a person, who is told the line to run."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path

_REJOIN = "HOSTRING_LAUNCH_REJOIN"  # how often `hostring launch` starts ranks again
_VARIABLES = (
    "MASTER_ADDR", "MASTER_PORT", "HOSTRING_STORE", "HOSTRING_TOPOLOGY", "HOSTRING_ORDER", "HOSTRING_WIRE",
    "HOSTRING_TRANSPORT", "HOSTRING_TIMEOUT", "HOSTRING_INTERFACE",
)  # fmt: skip


def nobody_restarts(environ: Mapping[str, str]) -> bool:
    """Whether a launcher ends all ranks as soon as one fails, so that there is nothing to wait for."""
    return environ.get(_REJOIN) == "0"


def how_to_rejoin(rank: int, world_size: int, environ: Mapping[str, str], argv: Sequence[str]) -> str:
    """What brings `rank` back into a group whose rank 0 runs `argv` under `environ`. The secret is not in it."""
    if environ.get(_REJOIN):
        return "hostring launch starts it again"
    program = "hostring" if Path(argv[0]).name in ("hostring", "__main__.py") else argv[0]
    command = shlex.join([program, *argv[1:]])
    own = " (its own --device, not this)" if any(arg.partition("=")[0] == "--device" for arg in argv) else ""
    if environ.get("HOSTRING_CLUSTER"):
        where = "on its machine, with the token (and its --name, if it was given one)"
        return f"start it again {where}{own}:\n    hostring cluster join TOKEN --again -m -- {command}"
    names = {
        "RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        **{name: environ[name] for name in _VARIABLES if environ.get(name)},
    }
    settings = " ".join(f"{name}={shlex.quote(value)}" for name, value in names.items())
    secret = ", with the group's HOSTRING_SECRET in its environment" if environ.get("HOSTRING_SECRET") else ""
    return f"start it again{secret}{own}:\n    HOSTRING_REJOIN=1 {settings} {command}"
