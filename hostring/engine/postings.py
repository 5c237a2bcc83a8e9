"""Point-to-point calls of a session: what is posted to its messenger, and what is made of the end."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from hostring.arrays.staging import adapter_for
from hostring.engine.arguments import check_peer, check_places, check_tag
from hostring.engine.session import Session


class Postings:
    """Sends and receives of one group."""

    def __init__(self, session: Session) -> None:
        self._session = session

    def send(self, x: Any, dst: int, tag: int, async_op: bool, timeout: float | None) -> Any:
        """See `Comm.send`."""
        session = self._session
        dst, tag = check_peer(dst, "dst", session.rank, session.world_size), check_tag(tag)
        session.check_alive()
        adapter = adapter_for(x)
        dtype, view = adapter.dtype(x), adapter.view(x)
        data = np.empty(math.prod(x.shape), dtype) if view is None else view
        if view is None:
            session.stage(adapter, x, data)
        seconds = session.timeout if timeout is None else timeout
        work = session.messenger.send(data, dst, tag, seconds, async_op, owner=x)
        return work if async_op else self._wait(work)

    def recv(self, x: Any, src: int | None, tag: int, async_op: bool, timeout: float | None) -> Any:
        """See `Comm.recv`."""
        session = self._session
        if src is not None:
            src = check_peer(src, "src", session.rank, session.world_size)
        tag = check_tag(tag)
        session.check_alive()
        adapter = adapter_for(x)
        dtype, view = adapter.dtype(x), adapter.view(x)
        if view is None:
            check_places("recv", "x", x)
        data = np.empty(math.prod(x.shape), dtype) if view is None else view
        put_back = None if view is not None else lambda: adapter.unstage(data, x)
        seconds = session.timeout if timeout is None else timeout
        result = x if view is not None else None
        work = session.messenger.recv(data, src, tag, seconds, result, put_back, async_op)
        return work if async_op else self._wait(work)

    def _wait(self, work: Any) -> Any:
        try:
            return work.wait()
        except BaseException as exc:
            raise self._session.fail(exc) from exc
