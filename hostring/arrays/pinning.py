"""Page-locked staging memory. An accelerator's driver copies to and from it without a buffer of its own."""

from __future__ import annotations

import weakref
from typing import Any, Final

from hostring.arrays.dtypes import Array

MIN_PINNED_NBYTES: Final = 1 << 16  # locking less takes longer than the driver's copy through its own buffer

_locked: dict[int, int] = {}  # bytes by address


def pin(array: Array, runtime: Any) -> bool:
    """Lock the memory block that `array` is a part of, once, until the block is freed.

    Args:
        array: in memory that is used again and again.
        runtime: such as `torch.cuda.cudart()`. It has `cudaHostRegister(address, nbytes, flags)`, which returns 0 for
            success, and `cudaHostUnregister(address)`.

    Returns:
        whether it is locked now. Otherwise copies are only slower.
    """
    block = array
    while isinstance(block.base, type(array)):
        block = block.base
    address, nbytes = block.ctypes.data, block.nbytes
    if nbytes < MIN_PINNED_NBYTES or block.base is not None:  # its owner may free it without our notice
        return False
    if _locked.get(address) == nbytes:
        return True
    if int(runtime.cudaHostRegister(address, nbytes, 0)) != 0:
        return False
    _locked[address] = nbytes
    weakref.finalize(block, _unlock, address, runtime).atexit = False  # the driver is gone by then
    return True


def _unlock(address: int, runtime: Any) -> None:
    del _locked[address]
    runtime.cudaHostUnregister(address)
