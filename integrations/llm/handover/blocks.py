"""How keys and values travel: one block for each layer of a chunk of rows, with a sha256 that the receiver checks.

A block has the shape (2, rows, kv_heads, head_dim), keys before values, in the dtype in which the sender computed them,
so that nothing is rounded before it travels. The receiver rounds once, to the dtype of its own cache.
"""

from __future__ import annotations

import hashlib
import struct
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

DIGEST_NBYTES = 32
Block = npt.NDArray[np.uint8]


class CorruptBlock(ValueError):
    """A block is not what was sent."""


@dataclass(frozen=True)
class BlockFormat:
    """How one rank's keys and values travel.

    Attributes:
        dtype: of each number, a name that torch knows. kv_heads, head_dim: of a row.
        pairs: neighbouring elements of a key turn together, and not one of each half.
    """

    dtype: str
    kv_heads: int
    head_dim: int
    pairs: bool

    def as_json(self) -> dict[str, Any]:
        return asdict(self)

    @property
    def torch_dtype(self) -> torch.dtype:
        found: torch.dtype = getattr(torch, self.dtype)
        return found

    def nbytes(self, n_rows: int) -> int:
        """Bytes of a block of so many rows, with its digest."""
        return DIGEST_NBYTES + 2 * n_rows * self.kv_heads * self.head_dim * self.torch_dtype.itemsize


def pack(form: BlockFormat, layer: int, start: int, kv: Tensor) -> Block:
    """The block of these keys and values. kv: shape (2, rows, kv_heads, head_dim); `start`: position of the first."""
    values = kv.to("cpu", form.torch_dtype).contiguous()
    block = np.empty(form.nbytes(kv.shape[1]), np.uint8)
    block[DIGEST_NBYTES:] = values.view(torch.uint8).view(-1).numpy()
    block[:DIGEST_NBYTES] = np.frombuffer(_digest(layer, start, block), np.uint8)
    return block


def unpack(form: BlockFormat, layer: int, start: int, block: Block) -> Tensor:
    """The keys and values of a block, as `pack` takes them.

    Raises:
        CorruptBlock: its digest is another one.
    """
    if _digest(layer, start, block) != block[:DIGEST_NBYTES].tobytes():
        raise CorruptBlock(f"layer {layer}")
    values = torch.from_numpy(block[DIGEST_NBYTES:]).view(form.torch_dtype)
    return values.view(2, -1, form.kv_heads, form.head_dim)


def laid_out(kv: Tensor, theirs: BlockFormat, ours: BlockFormat) -> Tensor:
    """Keys that turn as this rank's do; values are left as they are."""
    if theirs.pairs == ours.pairs:
        return kv
    half = theirs.head_dim // 2
    rows = kv[0].reshape(*kv.shape[1:-1], *((half, 2) if theirs.pairs else (2, half)))
    return torch.stack((rows.transpose(-1, -2).flatten(-2), kv[1]))


def _digest(layer: int, start: int, block: Block) -> bytes:
    """Of the payload, and of what it is: a block in the wrong place is noticed too."""
    sha256 = hashlib.sha256(struct.pack("<qq", layer, start))
    sha256.update(block[DIGEST_NBYTES:].data)
    return sha256.digest()
