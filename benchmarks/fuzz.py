"""Throws broken input at everything that reads bytes from elsewhere. Run: `python benchmarks/fuzz.py --inputs 1000000`.

Each target is a decoder, some good inputs, and the exceptions that it documents. Inputs are good ones that were damaged
(bits, lengths, cuts, splices) or plain noise; the same seed gives the same inputs. A target fails when it raises
anything else, takes longer than `SLOWEST`, or wants more memory than `--memory` allows. `tests/test_fuzz.py` throws
hypothesis's inputs at the same targets and keeps what once failed.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import random
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import base58
import msgpack
import numpy as np

from hostring.arrays.dtypes import MXINT8, PAYLOAD_CODES
from hostring.engine import frames as wire
from hostring.engine.binding import Buffers
from hostring.engine.control import Control
from hostring.engine.counters import Counters
from hostring.engine.engine import Engine
from hostring.engine.messenger import Messenger
from hostring.engine.receiving import Pipe
from hostring.engine.session import Session
from hostring.errors import HandshakeError, HostringError, PeerLostError
from hostring.group import handshake, ring_file
from hostring.group.group import Group
from hostring.group.handshake import RefusedError
from hostring.group.peer_info import Entry, PeerInfo, this_peer
from hostring.launch.token import Token
from hostring.store import protocol as message
from hostring.store.client import StoreRefusedError, _Connection
from hostring.transports import addresses

SLOWEST, LONGEST = 1.0, 30.0
"""Seconds of computing for one input, and seconds in all on a busy machine. What is unbounded takes longer."""

SECRET = b"fuzz"


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


class Feed:
    """A link on which `data` comes in, and then the peer is gone."""

    peer = 1

    def __init__(self, data: bytes) -> None:
        self._left = memoryview(data)

    def send(self, buffers: Sequence[Any]) -> int:
        return sum(memoryview(b).nbytes for b in buffers)

    def recv_into(self, view: Any) -> int:
        into = memoryview(view).cast("B")
        n = min(len(into), len(self._left))
        if not n and len(into):
            raise PeerLostError(self.peer, "connection closed")
        into[:n] = self._left[:n]
        self._left = self._left[n:]
        return n

    def recv_into_all(self, views: Sequence[Any]) -> int:
        return self.recv_into(next(v for v in views if memoryview(v).nbytes))

    def fileno(self) -> int:
        return -1

    def arm(self, recv: bool, send: bool) -> int:
        return 0

    def close(self) -> None: ...

    abort = close


# ------------------------------------------------------------------ what is read


@functools.cache
def hello(rank: int = 1) -> handshake.Hello:
    return handshake.Hello(b"g" * 16, bytes([rank]) * 16, 3, rank, "data", {"order": "rank"}, this_peer([]))


def greet(data: bytes) -> None:
    """First and second message, to either side."""
    for make in (
        lambda: handshake.accept(lambda kind: hello(0), lambda theirs: None, SECRET),
        lambda: handshake.dial(hello(2), 1, SECRET),
    ):
        for good in ([], [hello().to_bytes(b"n" * 16)]):
            protocol = make()
            next(protocol)
            try:
                for said in [*good, data]:
                    protocol.send(said)
            except (RefusedError, StopIteration):
                continue


def header(data: bytes) -> None:
    found = wire.decode(data.ljust(wire.HEADER_BYTES, b"\0"))
    if found is not None:
        found.describe()


def _alone(data: bytes) -> tuple[Engine, Any]:
    """An engine, and the planner of rank 0 of two, on whose link `data` comes."""
    pipes = {1: Pipe(Feed(data))}
    counters = Counters(pipes)
    group = Group(0, 2, "fuzz", 7, SECRET, peer_infos=[None, None])
    group.data = {1: Feed(data)}
    session = Session(group, topology="mesh", order="rank", wire="float32", timeout=1.0)
    return session.engine, (session, counters)


def frames(data: bytes) -> None:
    """A whole all-reduce, small and large, of float32."""
    engine, (session, _) = _alone(data)
    x = np.arange(6, dtype=np.float32)
    program = session.planner.all_reduce(6, x.dtype, "sum", None)
    with np.errstate(all="ignore"):
        engine.run(program, Buffers(x, np.empty(0, np.float32)), 0, 0.0, time.perf_counter())


def good_frames() -> list[bytes]:
    call = wire.Call("all_reduce", "sum", 0, "rank", 6, epoch=7)
    _, (session, _) = _alone(b"")
    program = session.planner.all_reduce(6, np.dtype(np.float32), "sum", None)
    ours = bytes(program.stages[0].incoming[0].header)
    blocks = (
        ours[: wire.EXPECTED_BYTES] + wire.payload_fields(PAYLOAD_CODES[MXINT8], 7) + bytes([1, 2, 3, 4, 5, 6, 127])
    )
    return [ours + np.arange(6, dtype=np.float32).tobytes(), blocks, bytes(call.header(0, 0, 0, 24)) + bytes(24)]


def messages(data: bytes) -> None:
    """A point-to-point link, with a receive posted."""
    messenger = Messenger(0, {1: Feed(data)}, Control(0, {}), Counters({}), 7)
    into = np.zeros(3, np.float32)
    work = messenger.recv(into, 1, 5, 1.0, into, None)
    messenger._traffic.move()
    if (error := work.exception()) is not None and not isinstance(error, HostringError):
        raise error


def control(data: bytes) -> None:
    ear = Control(0, {1: Feed(data)})
    ear._read(1)


def good_control() -> list[bytes]:
    bodies = [
        {"what": "abort", "kind": "PeerLostError", "message": "connection closed", "rank": 2},
        {"what": "probe"},
        {
            "what": "state",
            "waits_for": 2,
            "seq": 4,
            "header": bytes(wire.Call("barrier", None, 0, "rank", 0).header(0, 0, 0, 0)),
        },
        {"what": "farewell"},
    ]
    packed = [msgpack.packb(body) for body in bodies]
    single = [b"hCtl" + len(p).to_bytes(4, "little") + p for p in packed]
    return [*single, b"".join(single)]


def entry(data: bytes) -> None:
    Entry.from_bytes(1, data)


def member(data: bytes) -> None:
    PeerInfo.from_dict(message.unpack(data))


class _Answers:
    """A socket on which a store answers."""

    def __init__(self, data: bytes) -> None:
        self._left = data

    def settimeout(self, seconds: float) -> None: ...

    def setsockopt(self, *args: Any) -> None: ...

    def sendall(self, data: bytes) -> None: ...

    def recv(self, nbytes: int) -> bytes:
        got, self._left = self._left[:nbytes], self._left[nbytes:]
        return got


def store_answers(data: bytes) -> None:
    """What a client reads: a greeting and a verdict. Then answers, on a connection that is believed."""
    with contextlib.suppress(OSError, ValueError):
        _Connection(_Answers(data), b"c" * 16, SECRET, 1.0)  # type: ignore[arg-type]
    believed = _Connection.__new__(_Connection)
    believed.sock = _Answers(data)  # type: ignore[assignment]
    believed.call(5, b"", 1.0)


def ring(data: bytes) -> None:
    path = Path(_scratch) / "ring.json"
    path.write_bytes(data)
    ring_file.read_ring(str(path))


GOOD_RING = (
    b'{"master_ip": null, "master_port": 9002, "port": 9000, "right_ip": "192.168.77.2", "right_port": 9001, '
    b'"rank": 0, "world_size": 2}'
)


def places(data: bytes) -> None:
    text = data.decode("latin-1")
    with contextlib.suppress(ValueError):
        addresses.split_address(text, 1)
    addresses.choose(text, [addresses.Interface("eth0", "10.0.0.1"), addresses.Interface("lo", "127.0.0.1")])


def token(data: bytes) -> None:
    """As typed, and with a good checksum over bad contents."""
    with contextlib.suppress(ValueError):
        Token.parse(data.decode("latin-1"))
    Token.parse(base58.b58encode_check(data[:500]).decode())


def gguf(data: bytes) -> None:
    from hostring.integrations.llm.checkpoint.gguf_header import read_header

    read_header(Path("fuzzed.gguf"), data)  # type: ignore[arg-type]


def safetensors(data: bytes) -> None:
    from hostring.integrations.llm.checkpoint.safetensors_file import SafetensorsCheckpoint

    folder = Path(_scratch)
    (folder / "model.safetensors").write_bytes(data)
    (folder / "config.json").write_text(_QWEN, encoding="utf-8")
    SafetensorsCheckpoint(folder)


_QWEN = (
    '{"model_type": "qwen3", "hidden_size": 8, "num_attention_heads": 2, "vocab_size": 9, "intermediate_size": 8, '
    '"num_hidden_layers": 1}'
)


def good_models() -> tuple[list[bytes], list[bytes]]:
    """A GGUF header, and a safetensors file, of one small tensor."""
    from safetensors.numpy import save

    def text(x: str) -> bytes:
        return len(x).to_bytes(8, "little") + x.encode()

    def u32(x: int) -> bytes:
        return x.to_bytes(4, "little")

    def u64(x: int) -> bytes:
        return x.to_bytes(8, "little")

    fields = (
        text("general.alignment") + u32(4) + u32(32) + text("words") + u32(9) + u32(8) + u64(2) + text("a") + text("bc")
    )
    fields += text("scores") + u32(9) + u32(6) + u64(3) + bytes(12)
    tensors = text("token_embd.weight") + u32(2) + u64(4) + u64(3) + u32(0) + u64(0)
    head = b"GGUF" + u32(3) + u64(1) + u64(3) + fields + tensors
    return [head + bytes(-len(head) % 32 + 48)], [save({"w": np.arange(6, dtype=np.float32)})]


def targets() -> list[Target]:
    """All of them. Model files need the extra `llm`."""
    first = hello().to_bytes(b"n" * 16)
    me = this_peer([("10.0.0.1", 5), ("fe80::1%eth0", 6)])
    published = Entry(1, 3, b"n" * 16, "tcp", {"order": "rank"}, me).to_bytes()
    greeting = message.framed(message.pack({"hostring": "store 1", "server": b"s" * 16, "nonce": b"n" * 16}, 999))
    answer = message.framed(message.pack([5, True, b"value"], 999))
    p2p = wire.message_header(5, 0, 3, 0, 12, 7) + bytes(12)
    packed = msgpack.packb([1, 3, 1 << 33, b"s" * 16, [["10.0.0.1", 5]]])
    found = [
        Target("header", [h[:64] for h in [*good_frames(), p2p]], header, share=6),
        Target(
            "hello",
            [first, message.pack({"proof": b"p" * 32}, 99), message.pack({"refused": "x", "why": "y"}, 99)],
            greet,
            share=0.5,
        ),
        Target("frames", good_frames(), frames, (HostringError,), share=0.3),
        Target("messages", [p2p, p2p + p2p], messages, (HostringError,), share=1),
        Target("control", good_control(), control, share=2),
        Target("entry", [published], entry, (HandshakeError,), share=3),
        Target("peer info", [message.pack(me.to_dict(), 4096)], member, (ValueError,), share=3),
        Target(
            "store answers",
            [answer, greeting + answer, greeting],
            store_answers,
            (ValueError, OSError, StoreRefusedError),
            share=3,
        ),
        Target("RING_CONFIG", [GOOD_RING], ring, (ValueError,), share=1),
        Target("addresses", [b"[::1]:80", b"^lo,10.0.0.0/8", b"fe80::1%eth0"], places, (ValueError,), share=1),
        Target("token", [packed], token, (ValueError,), share=0.3),
    ]
    try:
        ggufs, saved = good_models()
    except ImportError:
        return found
    return [
        *found,
        Target("gguf", ggufs, gguf, (ValueError,), share=4),
        Target("safetensors", saved, safetensors, (ValueError, OSError), share=0.3),
    ]


# ------------------------------------------------------------------ how it is broken

_EVIL = (
    0,
    1,
    0x7F,
    0x80,
    0xFF,
    0xFFFF,
    0x7FFFFFFF,
    0x80000000,
    0xFFFFFFFF,
    1 << 40,
    (1 << 63) - 1,
    1 << 63,
    (1 << 64) - 1,
)


def damaged(seeds: Sequence[bytes], rng: random.Random) -> Iterator[bytes]:
    """Endless inputs."""
    while True:
        kind = rng.random()
        if kind < 0.05:
            yield rng.randbytes(rng.randrange(200))
            continue
        data = bytearray(rng.choice(seeds))
        for _ in range(rng.choice((1, 1, 1, 2, 3, 8))):
            at = rng.randrange(len(data) + 1)
            how = rng.randrange(7)
            if how == 0 and at < len(data):
                data[at] ^= 1 << rng.randrange(8)
            elif how == 1 and at < len(data):
                data[at] = rng.randrange(256)
            elif how == 2:
                width = rng.choice((1, 2, 4, 8))
                data[at : at + width] = (rng.choice(_EVIL) & ((1 << 8 * width) - 1)).to_bytes(
                    width, rng.choice(("little", "big"))
                )
            elif how == 3:
                del data[at:]
            elif how == 4:
                del data[at : at + rng.randrange(1, 9)]
            elif how == 5:
                data[at:at] = rng.randbytes(rng.randrange(1, 9))
            else:
                start = rng.randrange(len(data) + 1)
                data[at:at] = data[start : start + rng.randrange(1, 40)] * rng.choice((1, 1, 30))
        yield bytes(data)


@dataclass
class Tally:
    """What came of one target."""

    inputs: int = 0
    accepted: int = 0
    slowest: float = 0.0
    failures: list[tuple[bytes, str]] = field(default_factory=list)


def attempt(target: Target, data: bytes, tally: Tally) -> None:
    started, computed = time.perf_counter(), time.process_time()
    try:
        target.read(data)
        tally.accepted += 1
    except target.documented:
        pass
    except Exception as exc:
        tally.failures.append((data, f"{type(exc).__name__}: {exc}"))
    took, waited = time.process_time() - computed, time.perf_counter() - started
    tally.slowest = max(tally.slowest, took)
    tally.inputs += 1
    if took > SLOWEST or waited > LONGEST:
        tally.failures.append((data, f"took {took:.1f} s of computing, {waited:.1f} s in all"))


_folder = tempfile.TemporaryDirectory(prefix="hr-fuzz-", dir="/dev/shm" if Path("/dev/shm").is_dir() else None)
_scratch = _folder.name


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--inputs", type=int, default=1_000_000, help="over all targets")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--memory", type=float, default=4.0, help="GB of address space beyond what is used at the start"
    )
    parser.add_argument("--only", default="", help="one target's name")
    args = parser.parse_args()
    chosen = [t for t in targets() if args.only in ("", t.name)]
    if sys.platform == "linux":
        import resource

        now = int(Path("/proc/self/statm").read_text(encoding="utf-8").split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (now + int(args.memory * 1e9), resource.RLIM_INFINITY))
    total = sum(t.share for t in chosen)
    inputs = failures = 0
    for target in chosen:
        tally = Tally()
        for seed in target.seeds:
            with contextlib.suppress(*target.documented):
                target.read(seed)  # the first call imports things
            attempt(target, seed, tally)
        stream = damaged(target.seeds, random.Random(f"{args.seed} {target.name}"))
        started = time.perf_counter()
        for _ in range(int(args.inputs * target.share / total) + 1):
            attempt(target, next(stream), tally)
            if len(tally.failures) >= 20:
                break
        seconds = time.perf_counter() - started
        print(
            f"{target.name:14} {tally.inputs:8} inputs, {tally.accepted:7} taken, {len(tally.failures)} failures, "
            f"slowest {tally.slowest * 1e3:.1f} ms, {seconds:.1f} s",
            flush=True,
        )
        for data, why in tally.failures[:5]:
            print(f"    {why[:300]}\n    {data!r}")
        inputs, failures = inputs + tally.inputs, failures + len(tally.failures)
    print(f"{inputs} inputs, {failures} failures")
    return min(failures, 1)


if __name__ == "__main__":
    sys.exit(main())
