"""How the others reach this rank: opens its listeners before anybody is told of them."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from hostring.errors import RendezvousError
from hostring.group.start import Start
from hostring.transports.addresses import Address, is_loopback

log = logging.getLogger("hostring")


def open_listeners(start: Start, hosts: Sequence[str], port: int = 0) -> list[Address]:
    """Listen on `hosts`. Returns what to tell the others.

    Rank 0 warns if strangers can reach this group and no secret keeps them out: one line for all ranks.

    Raises:
        RendezvousError: this rank can listen nowhere.
    """
    try:
        listeners = start.transport.listen(hosts, port)
    except OSError as exc:
        raise RendezvousError(f"rank {start.rank} can't listen: {exc}", start.rank) from exc
    for listener in listeners:
        if listener.remove is not None:
            start.listening.callback(listener.remove)
        start.listening.callback(listener.sock.close)
        start.listeners.append(listener.sock)
    addresses = [listener.address for listener in listeners]
    if start.rank == 0 and start.row.reach == "network" and not start.config.secret:
        strangers_at = [host for host, _ in addresses if not is_loopback(host)]
        if strangers_at:
            log.warning(
                "hostring: rank 0 listens on %s without a secret: whoever reaches it can pose as a rank; "
                "set HOSTRING_SECRET on all ranks",
                ", ".join(strangers_at),
            )
    return addresses
