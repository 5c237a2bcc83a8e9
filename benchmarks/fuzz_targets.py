"""All that is thrown broken input at."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import fuzz_files as files
import fuzz_peers as peers
import msgpack

from hostring.engine import frames
from hostring.errors import HandshakeError, HostringError
from hostring.group.peer_info import Entry, this_peer
from hostring.store import protocol as message
from hostring.store.client import StoreRefusedError


@dataclass(frozen=True)
class Target:
    """One decoder.

    Attributes:
        seeds: good inputs, which must not raise.
        read: takes any bytes.
        documented: what `read` may raise.
        share: of all inputs, relative to the others; cheap decoders get more.
    """

    name: str
    seeds: Sequence[bytes]
    read: Callable[[bytes], object]
    documented: tuple[type[Exception], ...] = ()
    share: float = 1.0


def of_peers() -> list[Target]:
    """What is read from other ranks."""
    first = peers.hello().to_bytes(b"n" * 16)
    me = this_peer([("10.0.0.1", 5), ("fe80::1%eth0", 6)])
    published = Entry(1, 3, b"n" * 16, "tcp", {"order": "rank"}, me).to_bytes()
    verdicts = message.pack({"proof": b"p" * 32}, 99), message.pack({"refused": "x", "why": "y"}, 99)
    p2p = frames.message_header(5, 0, 3, 0, 12, 7) + bytes(12)
    headers = [frame[:64] for frame in [*peers.good_frames(), p2p]]
    return [
        Target("header", headers, peers.header, share=6),
        Target("hello", [first, *verdicts], peers.greet, share=0.5),
        Target("frames", peers.good_frames(), peers.frames, (HostringError,), share=0.3),
        Target("messages", [p2p, p2p + p2p], peers.messages, (HostringError,), share=1),
        Target("control", peers.good_control(), peers.control, share=2),
        Target("entry", [published], peers.entry, (HandshakeError,), share=3),
        Target("peer info", [message.pack(me.to_dict(), 4096)], peers.peer_info, (ValueError,), share=3),
    ]


def of_the_start() -> list[Target]:
    """What is read before there are peers."""
    greeting = message.framed(message.pack({"hostring": "store 1", "server": b"s" * 16, "nonce": b"n" * 16}, 999))
    answer = message.framed(message.pack([5, True, b"value"], 999))
    answers = [answer, greeting + answer, greeting]
    refusals = (ValueError, OSError, StoreRefusedError)
    packed = msgpack.packb([1, 3, 1 << 33, b"s" * 16, [["10.0.0.1", 5]]])
    addresses = [b"[::1]:80", b"^lo,10.0.0.0/8", b"fe80::1%eth0"]
    return [
        Target("store answers", answers, peers.store_answers, refusals, share=3),
        Target("RING_CONFIG", [files.GOOD_RING], files.ring, (ValueError,), share=1),
        Target("addresses", addresses, files.addresses_of, (ValueError,), share=1),
        Target("token", [packed], files.token, (ValueError,), share=0.3),
    ]


def of_models() -> list[Target]:
    """Model files, where the extra `llm` is installed."""
    try:
        ggufs, saved = files.good_models()
    except ImportError:
        return []
    return [
        Target("gguf", ggufs, files.gguf, (ValueError,), share=4),
        Target("safetensors", saved, files.safetensors, (ValueError, OSError), share=0.3),
    ]


def targets() -> list[Target]:
    return [*of_peers(), *of_the_start(), *of_models()]
