"""One control link: small frames to and from one rank, whole ones only, without waiting."""

from __future__ import annotations

import errno
import struct
import threading
from collections.abc import Callable
from typing import Any, Final

import msgpack

from hostring.errors import PeerLostError
from hostring.store.protocol import unpack
from hostring.transports.link import Link

Body = dict[str, Any]

_PREFIX: Final = struct.Struct("<4sI")
_MAGIC: Final = b"hCtl"
MAX_FRAME_NBYTES: Final = 1 << 16
_SILENCE: Final = (errno.ETIMEDOUT, errno.EHOSTUNREACH, errno.ENETUNREACH, errno.ENETDOWN)


def is_silence(exc: PeerLostError) -> bool:
    """Whether a link broke because nothing came from the other host, rather than because the other end closed it."""
    return getattr(exc.__cause__, "errno", None) in _SILENCE


class ControlLink:
    """Several threads may be in here.

    Attributes:
        gone: why nothing more will come; None while something may.
        silent: nothing came from its host any more, not even from its kernel.
        left: the rank closed the group in an orderly way.
    """

    def __init__(self, link: Link) -> None:
        self.link = link
        self.gone: str | None = None
        self.silent = False
        self.left = False
        self._received, self._unsent = bytearray(), bytearray()
        self._mute = False
        self._reading, self._telling = threading.Lock(), threading.Lock()

    @property
    def died(self) -> bool:
        """Whether the rank is gone without a farewell."""
        return self.gone is not None and not self.left

    def tell(self, body: Body) -> None:
        """Send a frame, as far as the link takes it."""
        packed = msgpack.packb(body)
        with self._telling:
            if self._mute:
                return
            try:
                self._send_rest()
                # Full: the rank has not read for very long, and a frame that was begun must stay whole.
                if len(self._unsent) <= MAX_FRAME_NBYTES:
                    self._unsent += _PREFIX.pack(_MAGIC, len(packed)) + packed
                    self._send_rest()
            except PeerLostError:  # reading finds out why; what the rank said before it closed may still be there
                self._mute = True

    def _send_rest(self) -> None:
        if self._unsent:
            taken = self.link.send((bytes(self._unsent),))
            del self._unsent[:taken]

    def read(self, take: Callable[[Body], None]) -> bool:
        """Give every frame that is there to `take`. Returns False when what came is no control frame."""
        chunk = bytearray(4096)
        with self._reading:
            try:
                while n := self.link.recv_into(chunk):
                    self._received += chunk[:n]
                    if not self._frames(take):
                        self._received.clear()
                        self.gone = "it sent bytes on its control link that are no control frame"
                        return False
            except PeerLostError as exc:
                self.gone, self.silent = exc.reason, is_silence(exc)
        return True

    def _frames(self, take: Callable[[Body], None]) -> bool:
        while len(self._received) >= _PREFIX.size:
            magic, nbytes = _PREFIX.unpack_from(self._received)
            if magic != _MAGIC or nbytes > MAX_FRAME_NBYTES:
                return False
            end = _PREFIX.size + nbytes
            if len(self._received) < end:
                return True
            frame = bytes(self._received[_PREFIX.size : end])
            del self._received[:end]
            try:
                take(unpack(frame))
            except (ValueError, TypeError, AttributeError, KeyError, OverflowError):  # fields of the wrong kind
                return False
        return True
