"""A rank's end: asks the head for pieces, and goes on where it was when the connection breaks."""

from __future__ import annotations

import hashlib
import platform
import socket
import time
from collections.abc import Callable, Iterator, Sequence

from hostring.errors import HandshakeError, RendezvousError
from hostring.shipping.channel import Channel, dial
from hostring.shipping.extents import Extent
from hostring.store.protocol import typed
from hostring.transports.addresses import Address, join_address

MAX_ASKED = 256  # pieces in one request
ANSWER_S = 20.0  # without a byte from the head, after which the connection counts as broken
PAUSE_S = 0.5  # between two attempts to connect

Answer = tuple[Extent, bytes, bytes | None]
"""A piece, its hash, and its bytes; None where the rank has them."""


class Supplier:
    """Gets pieces of files from a `ShipServer`.

    Args:
        addresses: of the server, to be tried in turn.
        rank: for which it gets them.
        patience: seconds to wait for the head when nothing comes.
        waiting: told why it waits.
    """

    def __init__(
        self,
        addresses: Sequence[Address],
        secret: bytes,
        rank: int,
        patience: float = 300.0,
        waiting: Callable[[str], None] = lambda why: None,
    ) -> None:
        self._addresses, self._secret, self._rank = list(addresses), secret, rank
        self._patience, self._waiting = patience, waiting
        self._channel: Channel | None = None
        self._starts = True
        self.received_nbytes = 0

    def fetch(self, wanted: Sequence[tuple[Extent, bytes | None]], planned: int) -> Iterator[Answer]:
        """The bytes of each piece whose hash at the head is another than the given one.

        Args:
            planned: bytes that this rank needs in all, for the head's figures.

        Raises:
            HandshakeError: the head doesn't know the secret, or a piece isn't what its hash says.
            RendezvousError: the head can't be reached for too long.
        """
        done, last = 0, time.monotonic()
        while done < len(wanted):
            try:
                for answer in self._ask(wanted[done : done + MAX_ASKED], planned):
                    done, last = done + 1, time.monotonic()
                    yield answer
            except HandshakeError:
                self.close()
                raise
            except (OSError, ValueError) as exc:
                self.close()
                if time.monotonic() - last > self._patience:
                    raise RendezvousError(
                        f"the head sent nothing of the model for {self._patience:.0f} s; {len(wanted) - done} pieces "
                        f"are missing ({exc})"
                    ) from exc
                self._waiting(f"the connection to the head broke ({exc}); {len(wanted) - done} pieces are missing")
                time.sleep(PAUSE_S)

    def _ask(self, wanted: Sequence[tuple[Extent, bytes | None]], planned: int) -> Iterator[Answer]:
        channel = self._connected()
        asked = [[[p.file, p.offset, p.width, p.stride, p.count], known] for p, known in wanted]
        about = {"rank": self._rank, "host": platform.node(), "planned": planned, "starts": self._starts}
        channel.send({**about, "pieces": asked})
        self._starts = False
        for piece, known in wanted:
            answer = channel.receive()
            digest, nbytes = typed(answer, 0, bytes), typed(answer, 1, int)
            if not nbytes and digest == known:
                yield piece, digest, None
                continue
            if nbytes != piece.nbytes:
                raise ValueError(f"the head sent {nbytes} bytes for a piece of {piece.nbytes}")
            content = channel.receive_body(nbytes)
            if hashlib.sha256(content).digest() != digest:
                raise ValueError("a piece was damaged on its way")
            self.received_nbytes += nbytes
            yield piece, digest, content

    def _connected(self) -> Channel:
        if self._channel is None:
            self._channel = self._dialed()
        return self._channel

    def _dialed(self) -> Channel:
        reasons = []
        for address in self._addresses:
            try:
                sock = socket.create_connection(address, timeout=5.0)
            except OSError as exc:
                reasons.append(f"{join_address(*address)}: {exc}")
                continue
            try:
                sock.settimeout(ANSWER_S)
                return dial(sock, self._secret)
            except BaseException:
                sock.close()
                raise
        raise ConnectionError("; ".join(reasons))

    def close(self) -> None:
        """End the connection. Another one is made when it is needed."""
        channel, self._channel = self._channel, None
        if channel is not None:
            channel.close()
