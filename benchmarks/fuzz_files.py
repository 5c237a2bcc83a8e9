"""What reads files, and what people type: each reader takes any bytes; `good_*` are inputs that it accepts."""

from __future__ import annotations

import contextlib
import tempfile
from pathlib import Path

import base58
import numpy as np

from hostring.group import ring_file
from hostring.launch.token import Token
from hostring.transports import addresses

_folder = tempfile.TemporaryDirectory(prefix="hr-fuzz-", dir="/dev/shm" if Path("/dev/shm").is_dir() else None)
_scratch = _folder.name


def ring(data: bytes) -> None:
    path = Path(_scratch) / "ring.json"
    path.write_bytes(data)
    ring_file.read_ring(str(path))


GOOD_RING = (
    b'{"master_ip": null, "master_port": 9002, "port": 9000, "right_ip": "192.168.77.2", "right_port": 9001, '
    b'"rank": 0, "world_size": 2}'
)


def addresses_of(data: bytes) -> None:
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
