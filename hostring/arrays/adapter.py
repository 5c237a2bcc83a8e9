"""The contract between hostring and an array library: how arrays are copied to flat host memory and back."""

from __future__ import annotations

import math
from typing import Any

from hostring.arrays.dtypes import BY_NAME, Array, DType


class Adapter:
    """How arrays of one type travel. Subclasses implement `stage` and `unstage`; `register_adapter` takes them."""

    def stage(self, x: Any, host: Array) -> None:
        """Copy all elements of `x`, in C order, into the flat array `host`, casting to its dtype."""
        raise NotImplementedError

    def unstage(self, host: Array, x: Any, shape: tuple[int, ...] | None = None) -> Any:
        """Bring `host` back, rounding to nearest even into the dtype of `x`.

        Args:
            shape: None: into `x` itself, which is returned, or into a new array where `x` can't be changed.
                Otherwise a new array of this shape, of the dtype and on the device of `x`.
        """
        raise NotImplementedError

    def view(self, x: Any) -> Array | None:
        """The memory of `x` as a flat, contiguous, writable `np.ndarray` in its own dtype, or None."""
        return None

    def dtype(self, x: Any) -> DType:
        """The numpy (or ml_dtypes) dtype that holds the elements of `x`.

        Raises:
            TypeError: `x` can't travel. This is where an adapter refuses, since nothing has been sent yet.
        """
        name = str(x.dtype).rpartition(".")[2]
        if name not in BY_NAME:
            raise TypeError(f"dtype {x.dtype} can't travel; use one of {', '.join(BY_NAME)}")
        return BY_NAME[name]

    def describe(self, x: Any) -> tuple[Array | None, DType, int]:
        """`view`, `dtype` and the number of elements in one call."""
        view = self.view(x)
        if view is not None:
            return view, view.dtype, view.size
        return None, self.dtype(x), math.prod(x.shape)

    def writable(self, x: Any) -> bool:
        """Whether `unstage` without a shape changes `x` itself. Where it doesn't, results are new arrays."""
        return True

    def overlap(self, x: Any) -> int:
        """A checksum of which elements of `x` share memory, as in an expanded tensor. See `overlaps`.

        Returns:
            0 where no two elements do, or where `x` isn't writable, so that results are new arrays.
        """
        return 0

    def empty(self, x: Any, shape: tuple[int, ...]) -> Any:
        """A new array of `shape`, of the dtype and on the device of `x`, or None where `unstage` makes results."""
        return None

    def reuse(self, x: Any, room: Array) -> None:
        """Prepare `room`, in which this call and later ones stage arrays; by page-locking it, for example."""
