"""TCP links under TLS 1.3, for networks where others may listen.

Both ends prove with a certificate that they hold the group's secret, and accept no other: the key pair is derived from
the secret, so that the join token (or `HOSTRING_SECRET`) pins it and nothing has to be handed out besides.
"""

from __future__ import annotations

import contextlib
import datetime
import os
import socket
import ssl
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial

from hostring.errors import HandshakeError, PeerLostError
from hostring.transports.link import Buffer, LinkKey
from hostring.transports.registry import Met
from hostring.transports.tcp import SocketLink, listen, tune, usable, watch

__all__ = ["TlsLink", "Wrapper", "listen", "make_links", "unsupported", "usable"]

MAX_RECORD_BYTES = 1 << 14
"""The longest TLS record. A longer write becomes several records."""

_ORDER = 0xFFFFFFFF00000000FFFFFFFFFFFFFFFFBCE6FAADA7179E84F3B9CAC2FC632551  # of the P-256 group (FIPS 186-4, D.1.2.3)
_VALID_FROM, _VALID_TO = datetime.datetime(2020, 1, 1), datetime.datetime(2100, 1, 1)
"""Of a certificate. What expires is the token, not the certificate."""


class TlsLink(SocketLink):
    """A link over an encrypted socket. One thread may send while another receives: a lock lets one in at a time.

    A record that the socket has no room for must be given to TLS again unchanged. It is kept here. It counts as taken
    once it was sent and the caller has offered its bytes again, as every caller does with what was not taken.
    """

    __slots__ = ("_kept", "_lock", "_owed")

    def __init__(self, sock: ssl.SSLSocket, peer: int) -> None:
        super().__init__(sock, peer)
        self._kept = b""
        self._owed = 0  # bytes that have left and are still to be counted as taken
        self._lock = threading.Lock()

    def send(self, buffers: Sequence[Buffer]) -> int:
        """See `Link.send`."""
        with self._lock:
            taken = min(self._owed, sum(memoryview(b).nbytes for b in buffers))
            self._owed -= taken
            for record in _records(buffers, taken):
                begun = self._kept or record
                if begun[: len(record)] != record[: len(begun)]:
                    raise PeerLostError(self.peer, "send: the pipe is full, and what was begun is not offered again")
                if not self._attempt(partial(self._sock.send, begun), "send"):
                    self._kept = begun
                    break
                self._kept = b""
                taken += min(len(begun), len(record))
                self._owed = max(0, len(begun) - len(record))
                if len(begun) != len(record):
                    break
            return taken

    def recv_into(self, view: Buffer) -> int:
        """See `Link.recv_into`."""
        if not memoryview(view).nbytes:
            return 0
        with self._lock:
            return self._received(view)

    def recv_into_all(self, views: Sequence[Buffer]) -> int:
        """See `Link.recv_into_all`."""
        total = 0
        with self._lock:
            for view in views:
                nbytes = memoryview(view).nbytes
                n = self._received(view) if nbytes else 0
                total += n
                if n < nbytes:
                    break
        return total

    def _received(self, view: Buffer) -> int:
        closed: list[bool] = []

        def read() -> int:
            n = self._sock.recv_into(view)
            if n == 0:
                closed.append(True)
            return n

        n = self._attempt(read, "recv")
        if closed:
            raise PeerLostError(self.peer, "connection closed")
        return n

    def _attempt(self, act: Callable[[], int], what: str) -> int:
        try:
            return act()
        except (ssl.SSLWantReadError, ssl.SSLWantWriteError, BlockingIOError):
            return 0
        except (ssl.SSLZeroReturnError, ssl.SSLEOFError) as exc:
            raise PeerLostError(self.peer, "connection closed") from exc
        except OSError as exc:
            raise PeerLostError(self.peer, f"{what}: {exc}") from exc


def _records(buffers: Sequence[Buffer], skip: int) -> Iterator[bytes]:
    """The bytes of `buffers` from `skip` on, in pieces of a record's length: a header and a short payload share one."""
    piece = bytearray()
    for view in (memoryview(b).cast("B") for b in buffers if memoryview(b).nbytes):
        at = min(skip, len(view))
        skip -= at
        while at < len(view):
            n = min(MAX_RECORD_BYTES - len(piece), len(view) - at)
            piece += view[at : at + n]
            at += n
            if len(piece) == MAX_RECORD_BYTES:
                yield bytes(piece)
                piece.clear()
    if piece:
        yield bytes(piece)


class Wrapper:
    """Makes the links of one group.

    Raises:
        ModuleNotFoundError: the package `cryptography` is missing.
    """

    def __init__(self, secret: bytes, rank: int) -> None:
        self._rank = rank
        chain, key, anchor = _identity(secret)
        self._contexts = {
            side: self._context(side, chain, key, anchor) for side in (ssl.PROTOCOL_TLS_CLIENT, ssl.PROTOCOL_TLS_SERVER)
        }

    @staticmethod
    def _context(side: int, chain: bytes, key: bytes, anchor: bytes) -> ssl.SSLContext:
        context = ssl.SSLContext(side)
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.check_hostname = False  # whoever holds the group's key is a member, whatever its address
        context.verify_mode = ssl.CERT_REQUIRED
        context.load_verify_locations(cadata=anchor.decode())
        if side == ssl.PROTOCOL_TLS_SERVER:
            context.num_tickets = 0
        handle, path = tempfile.mkstemp(prefix="hostring-")  # the ssl module takes keys from files only; 0600
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(key + chain)
            context.load_cert_chain(path)
        finally:
            os.unlink(path)
        return context

    def wrap(self, sock: socket.socket, peer: int, deadline: float) -> TlsLink:
        """Make a connected socket, whose hello is done, the encrypted link to `peer`.

        Raises:
            HandshakeError: the other end does not prove that it holds the group's key, or not in time.
        """
        tune(sock)
        serves = self._rank < peer  # the higher rank dials
        sock.settimeout(max(0.1, deadline - time.monotonic()))
        try:
            wrapped = self._contexts[ssl.PROTOCOL_TLS_SERVER if serves else ssl.PROTOCOL_TLS_CLIENT].wrap_socket(
                sock, server_side=serves
            )
        except OSError as exc:
            raise HandshakeError(
                f"rank {peer} did not prove by TLS that it belongs to this group: {exc}", peer
            ) from exc
        return TlsLink(wrapped, peer)


def _identity(secret: bytes) -> tuple[bytes, bytes, bytes]:
    """Certificate, private key and trust anchor of a group, as PEM. The key is the same on all its ranks."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.hazmat.primitives.kdf.hkdf import HKDF

    seed = HKDF(hashes.SHA256(), 48, salt=b"hostring", info=b"tls key of the group").derive(secret)
    key = ec.derive_private_key(int.from_bytes(seed, "big") % (_ORDER - 1) + 1, ec.SECP256R1())

    def certificate(name: str, authority: bool) -> bytes:
        def called(what: str) -> x509.Name:
            return x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, what)])

        built = x509.CertificateBuilder(
            called("hostring group"), called(name), key.public_key(), 1 + authority, _VALID_FROM, _VALID_TO
        )
        signed = built.add_extension(x509.BasicConstraints(ca=authority, path_length=None), critical=True).sign(
            key, hashes.SHA256()
        )
        return signed.public_bytes(serialization.Encoding.PEM)

    private = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    return certificate("hostring rank", False), private, certificate("hostring group", True)


def unsupported() -> str:
    """Why there can be no TLS here; empty when there can."""
    with contextlib.suppress(ModuleNotFoundError):
        import cryptography  # noqa: F401

        return ""
    return "the package cryptography is missing: pip install 'hostring[tls]'"


def make_links(met: Met) -> dict[LinkKey, TlsLink]:
    """See `TransportModule`. In one order on all ranks: they talk here, and would wait in a circle otherwise."""
    wrapper = Wrapper(met.secret, met.rank)
    links = {}
    for peer, kind in sorted(met.sockets, key=lambda key: (min(key[0], met.rank), max(key[0], met.rank), key[1])):
        sock = met.sockets[peer, kind]
        if kind == "control":
            watch(sock)
        links[peer, kind] = wrapper.wrap(sock, peer, met.deadline)
    return links
