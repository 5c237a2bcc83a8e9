"""Host memory of a group, kept from call to call: where arrays are staged, and where small ones are joined."""

from __future__ import annotations

from typing import Final

import numpy as np

from hostring.arrays.dtypes import Array, DType
from hostring.topologies.schedule import offsets

NOTHING: Final = np.empty(0, np.uint8)
KEPT_NBYTES: Final = 1 << 26  # staging memory above this shrinks again when calls are much smaller
MAX_STAGING_VIEWS: Final = 64
MAX_LISTS: Final = 16  # lists of arrays whose pieces are remembered

Pieces = tuple[Array, list[Array]]


class HostMemory:
    """Two blocks: one to stage arrays in, and one to join small arrays in. A call may need both."""

    def __init__(self) -> None:
        self._staging, self._joined = NOTHING, NOTHING
        # The same array object for the same size, because adapters remember it. By (n_elements, dtype, after).
        self._views: dict[tuple[int, DType, int], Array] = {}
        self._pieces: dict[tuple[tuple[int, ...], DType], Pieces] = {}

    @property
    def nbytes(self) -> int:
        """Bytes of both blocks."""
        return self._staging.nbytes + self._joined.nbytes

    def staging(self, n_elements: int, dtype: DType, after: int = 0) -> Array:
        """Memory for `n_elements` of `dtype`, behind `after` bytes. The next call uses it again."""
        key = n_elements, dtype, after
        known = self._views.get(key)
        if known is not None:
            return known
        nbytes = after + n_elements * dtype.itemsize
        too_small = nbytes > self._staging.nbytes
        far_too_large = self._staging.nbytes > max(4 * nbytes, KEPT_NBYTES)
        if too_small or far_too_large:
            self._staging = np.empty(nbytes, np.uint8)
        if too_small or far_too_large or len(self._views) >= MAX_STAGING_VIEWS:
            self._views.clear()
        view = self._views[key] = self._staging[after:nbytes].view(dtype)
        return view

    def joined(self, sizes: tuple[int, ...], dtype: DType) -> Pieces:
        """A buffer for arrays of these many elements, one after the other, and its pieces. No staging uses it."""
        key = sizes, dtype
        known = self._pieces.get(key)
        if known is not None:
            return known
        nbytes = sum(sizes) * dtype.itemsize
        if nbytes > self._joined.nbytes:
            self._pieces.clear()
            self._joined = np.empty(nbytes, np.uint8)
        if len(self._pieces) >= MAX_LISTS:
            self._pieces.clear()
        whole = self._joined[:nbytes].view(dtype)
        known = self._pieces[key] = whole, [whole[a:b] for a, b in offsets(sizes)]
        return known
