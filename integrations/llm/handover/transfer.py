"""The blocks under way between two ranks, and how much of their time the sender's computing hides."""

from __future__ import annotations

from collections import deque
from dataclasses import asdict, dataclass
from time import perf_counter
from typing import Any

import numpy as np
from torch import Tensor

from hostring import Comm, HostringError, Work
from hostring.integrations.llm.handover.blocks import Block, BlockFormat, CorruptBlock, pack, unpack

BLOCK_TAG, CONFIRM_TAG, CANDIDATES_TAG, TOKEN_TAG = range(21, 25)
CONFIRM_NBYTES = 8  # the layer's number, once its block is checked and stored
MAX_IN_FLIGHT_NBYTES = 64 << 20  # of blocks that are sent and not confirmed; bounds the memory on both ranks


@dataclass
class Figures:
    """What handing over cost on this rank since the last restart.

    Attributes:
        blocks, kv_bytes: sent or received. rows: of prompts, computed or received.
        caught_up: tokens that the other rank had decoded, and that this rank computed again before a prompt.
        hash_s: seconds of packing and hashing, or of hashing and storing.
        transfer_s: seconds with a block under way, from its sending to its confirmation; on the sender only.
        exposed_s: of these, seconds in which the sender had nothing left to compute, or waited for room.
        hidden_s: the others.
    """

    blocks: int = 0
    kv_bytes: int = 0
    rows: int = 0
    caught_up: int = 0
    hash_s: float = 0.0
    transfer_s: float = 0.0
    exposed_s: float = 0.0

    def as_dict(self) -> dict[str, Any]:
        return {**asdict(self), "hidden_s": max(0.0, self.transfer_s - self.exposed_s)}


class _Sent:
    """A block under way."""

    def __init__(self, comm: Comm, dst: int, block: Block) -> None:
        self.nbytes, self.queued, self.confirmed = block.nbytes, perf_counter(), 0.0
        self._confirmation: Work = comm.recv(np.empty(1, np.int64), dst, CONFIRM_TAG, async_op=True)
        self._confirmation.add_done_callback(self._note)
        self._sending: Work = comm.send(block, dst, BLOCK_TAG, async_op=True)

    def _note(self, work: Work) -> None:
        self.confirmed = perf_counter()

    def wait(self) -> None:
        self._sending.wait()
        self._confirmation.wait()


class BlockSender:
    """Sends blocks while the caller computes on, and learns when each of them is in place."""

    def __init__(self, comm: Comm, dst: int, form: BlockFormat) -> None:
        self.figures = Figures()
        self._comm, self._dst, self._form = comm, dst, form
        self._under_way: deque[_Sent] = deque()
        self._last_confirmed = 0.0

    def send(self, layer: int, start: int, kv: Tensor) -> None:
        """Send one layer's keys and values of a chunk whose first row is at `start`; see `pack`."""
        begun = perf_counter()
        block = pack(self._form, layer, start, kv)
        self.figures.hash_s += perf_counter() - begun
        self.figures.blocks += 1
        self.figures.kv_bytes += block.nbytes
        self._under_way.append(_Sent(self._comm, self._dst, block))
        self._settle(MAX_IN_FLIGHT_NBYTES)

    def drain(self) -> None:
        """Wait until every block is in place at the other rank."""
        self._settle(0)

    def _settle(self, most: int) -> None:
        """Forget what is confirmed, and wait until no more than `most` bytes are under way."""
        begun = perf_counter()
        while self._under_way and (self._under_way[0].confirmed or sum(one.nbytes for one in self._under_way) > most):
            one = self._under_way.popleft()
            one.wait()
            self.figures.transfer_s += max(0.0, one.confirmed - max(one.queued, self._last_confirmed))
            self._last_confirmed = one.confirmed
        self.figures.exposed_s += perf_counter() - begun


class BlockReceiver:
    """Receives blocks in order, checks them, and confirms each."""

    def __init__(self, comm: Comm, src: int, form: BlockFormat) -> None:
        self.figures = Figures()
        self._comm, self._src, self._form = comm, src, form

    def receive(self, n_layers: int, start: int, n_rows: int, store: Any) -> None:
        """Receive all layers of a chunk. `store` is called with each layer's number and its keys and values.

        Raises:
            HostringError: a block is corrupted, or the group failed.
        """
        nbytes = self._form.nbytes(n_rows)
        ahead = max(1, min(n_layers, MAX_IN_FLIGHT_NBYTES // nbytes))
        posted = deque(self._post(nbytes) for _ in range(ahead))
        for layer in range(n_layers):
            block = posted.popleft().wait()
            if layer + ahead < n_layers:
                posted.append(self._post(nbytes))
            begun = perf_counter()
            try:
                store(layer, unpack(self._form, layer, start, block))
            except CorruptBlock:
                raise self._corrupted(layer, start, n_rows) from None
            self.figures.hash_s += perf_counter() - begun
            self.figures.blocks += 1
            self.figures.kv_bytes += nbytes
            self._comm.send(np.array([layer], np.int64), self._src, CONFIRM_TAG)

    def _post(self, nbytes: int) -> Work:
        work: Work = self._comm.recv(np.empty(nbytes, np.uint8), self._src, BLOCK_TAG, async_op=True)
        return work

    def _corrupted(self, layer: int, start: int, n_rows: int) -> HostringError:
        return HostringError(
            f"keys and values of layer {layer}, rows {start} to {start + n_rows - 1}, came corrupted from rank "
            f"{self._src}: their sha256 is another one than it sent; ask again, and if it happens again, check the "
            f"memory and the network of ranks {self._src} and {self._comm.rank}",
            self._src,
        )
