"""hostring: vendor-agnostic, host-staged collective communication with the same bits on every rank."""

from __future__ import annotations

import importlib
import os
from typing import TYPE_CHECKING, Any

from hostring import platforms, torch_hook

if TYPE_CHECKING:
    from hostring.arrays.adapter import Adapter
    from hostring.arrays.feedback import Feedback
    from hostring.arrays.staging import register_adapter
    from hostring.comm import Comm
    from hostring.engine.work import Work
    from hostring.errors import (
        CollectiveMismatch,
        GroupClosedError,
        HandshakeError,
        HostringError,
        OperationTimeout,
        PeerLostError,
        ProtocolError,
        RendezvousError,
    )
    from hostring.topologies.units import UnitFold

__version__ = "0.1.0"
__all__ = [
    "Adapter",
    "CollectiveMismatch",
    "Comm",
    "Feedback",
    "GroupClosedError",
    "HandshakeError",
    "HostringError",
    "OperationTimeout",
    "PeerLostError",
    "ProtocolError",
    "RendezvousError",
    "UnitFold",
    "Work",
    "init",
    "register_adapter",
]


_HOMES = {
    "Adapter": "arrays.adapter",
    "Comm": "comm",
    "Feedback": "arrays.feedback",
    "UnitFold": "topologies.units",
    "Work": "engine.work",
    "register_adapter": "arrays.staging",
}


def __getattr__(name: str) -> Any:
    """Load a public name when it is first used: `import torch` loads this package for one entry point alone."""
    if name not in __all__:
        raise AttributeError(f"module 'hostring' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"hostring.{_HOMES.get(name, 'errors')}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])


def init(
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
    rejoin: bool | None = None,
    background: bool = False,
) -> Comm:
    """Join the group of ranks that this process was started for.

    What is not given is read from `RING_CONFIG`, then from the launcher's variables (hostring launch, torchrun, mpirun,
    srun); with none of them, the group has this one rank, and every collective is the identity.

    Args:
        rank: this process's index, 0 … world_size - 1.
        world_size: number of ranks.
        topology: auto, mesh, ring, star, tree, dissemination, or rules such as
            "all_reduce:mesh/two_shot;broadcast:star", see docs/topologies.md. It never changes a bit of a result;
            "auto" chooses by size.
        order: rank, ring or tree, the declared fold order, part of the group's contract.
        wire: float32 (the default), bfloat16, mxint8 or mxfp4. What float32 arrays contribute to reductions is rounded
            to that, and travels in a half, a quarter (mxint8) or an eighth (mxfp4) of the bytes; the latter two have
            blocks of 32 that share a power of two. It is still folded in float32. mxint8-both and mxfp4-both round
            the results of all-reduces as well, so that these travel in as few bytes. Part of the group's contract.
        transport: auto (shared memory within a host, TCP between hosts), tcp, unix, shm, or memory for ranks that are
            threads of one process.
        timeout: seconds for start-up, and for each operation unless it says otherwise. 120 by default.
        silence: seconds without a sign of life after which a rank counts as lost, whatever `timeout` is: a process that
            stands still, or whose host is cut off, closes no link. Ranks look for none by default.
        rejoin: come back into a group whose survivors call `rebuild`, as the process that is to be rank `rank`.
            By default when `HOSTRING_REJOIN=1`.
        background: return as soon as the ranks know of each other. Their links are then made in the background, and
            the first call waits for them and raises what went wrong. For programs that make many groups.
        store: a rendezvous store to use instead: torch's, or `hostring.rendezvous.MemoryStore` for threads.

    Raises:
        ValueError: names that are unknown or don't go together; nothing was opened.
        RendezvousError, HandshakeError: the ranks did not find each other, or don't agree. The message names who.
        RuntimeError: this is neither Linux nor macOS.
    """
    platforms.prepare_process()
    from hostring.comm import Comm
    from hostring.group.config import from_environment
    from hostring.group.contract import contract, neighbours
    from hostring.group.group import Group, find
    from hostring.group.group import rejoin as come_back
    from hostring.launch.orphans import end_with_launcher
    from hostring.tuning.agreement import open_session

    given: dict[str, Any] = {"topology": topology, "order": order, "wire": wire, "transport": transport}
    config = from_environment(rank, world_size, **given, timeout=timeout, silence=silence, store=store)
    end_with_launcher()
    declared = contract(config.topology, config.order, config.wire)
    near = neighbours(config.topology, config.order)

    def form(group: Group) -> Comm:
        return Comm(open_session(group, config.topology, config.order, config.wire, config.timeout))

    if os.environ.get("HOSTRING_REJOIN") == "1" if rejoin is None else rejoin:
        return form(come_back(config, neighbours=near, contract=declared))
    found = find(config, neighbours=near, contract=declared)
    if background and config.world_size > 1:
        from hostring.late_comm import LateComm

        return LateComm(found, form)
    return form(found.link())


platforms.check_links()
torch_hook.arrange()
