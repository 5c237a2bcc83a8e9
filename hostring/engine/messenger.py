"""Point-to-point messages, on links of their own: what a group's `send` and `recv` start."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hostring.arrays.dtypes import Array
from hostring.engine.control import again
from hostring.engine.matching import MessageWork
from hostring.engine.message_link import MessageLink
from hostring.engine.message_progress import MessageProgress
from hostring.errors import HostringError


class Messenger(MessageProgress):
    """All point-to-point traffic of one rank."""

    def send(
        self, data: Array, dst: int, tag: int, seconds: float, background: bool = False, owner: Any = None
    ) -> MessageWork:
        """Queue a flat array for `dst`. As much as the link takes is sent at once."""
        link = self._link(dst)
        work = MessageWork(f"send to rank {dst}, tag {tag}", seconds, self)
        work.wanted, work.tag, work.owner = dst, tag, data if owner is None else owner
        with self._mutex:
            link.queue(data, work)
            self._try(link, link.push)
        self._nudge(background and not work.is_completed())
        return work

    def recv(
        self,
        into: Array,
        src: int | None,
        tag: int,
        seconds: float,
        result: Any,
        put_back: Callable[[], Any] | None,
        background: bool = False,
    ) -> MessageWork:
        """Post a receive into a flat array. It is served at once when its message is already here."""
        if src is not None:
            self._link(src)
        work = MessageWork(f"recv from {'any rank' if src is None else f'rank {src}'}, tag {tag}", seconds, self)
        work.into, work.wanted, work.tag, work.result, work.put_back = into, src, tag, result, put_back
        with self._mutex:
            try:
                self._matching.post(work)
            except HostringError as exc:
                self._fail(exc)
                work.finish(error=exc)
        self._nudge(background and not work.is_completed())
        return work

    def _link(self, rank: int) -> MessageLink:
        if self._cause is not None:
            raise again(self._cause)
        if rank not in self._links:
            raise ValueError(
                f"rank {self._rank} has no link to rank {rank}: this group only knows the addresses of its neighbours"
            )
        return self._links[rank]
