"""Page-locked staging memory: an accelerator's driver copies to and from it directly, not through a buffer of its own."""

from __future__ import annotations

import weakref
from typing import Any, Final

from hostring.arrays.dtypes import Array

WORTH_NBYTES: Final = 1 << 16  # locking takes longer than the driver's own copy of less than this

_locked: dict[int, int] = {}  # bytes by address


def pin(array: Array, runtime: Any) -> bool:
    """Lock the memory block that `array` is a part of, once, until the block is freed.

    Args:
        array: in memory that is used again and again.
        runtime: `torch.cuda.cudart()` or the like: `cudaHostRegister(address, nbytes, flags)`, which returns 0 when it worked,
            and `cudaHostUnregister(address)`.

    Returns:
        whether it is locked now. Where it isn't, copies are slower, and that is all.
    """
    block = array
    while isinstance(block.base, type(array)):
        block = block.base
    address, nbytes = block.ctypes.data, block.nbytes
    if nbytes < WORTH_NBYTES or block.base is not None:  # memory of somebody else's may be freed without our knowing
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
