"""The dtypes that travel, their codes in frames, and which operator may reduce which of them.

Reductions compute in the *wire dtype*: float32 for every float of 32 bits or less, the dtype itself otherwise. Every
float16, bfloat16 and float8 value is exactly a float32 value, so ranks of different float dtypes sum the same numbers.
"""

from __future__ import annotations

from typing import Any, Final, TypeAlias

import ml_dtypes
import numpy as np
import numpy.typing as npt

Array: TypeAlias = "npt.NDArray[Any]"
DType: TypeAlias = "np.dtype[Any]"

# The position in this tuple is the code in frames. Append only.
NAMES: Final = (
    "bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64",
    "float16", "bfloat16", "float32", "float64", "complex64", "complex128",
    "float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu", "float8_e4m3",
    "float8_e3m4", "float8_e4m3b11fnuz",
)  # fmt: skip


def _dtype(name: str) -> DType:
    return np.dtype(getattr(ml_dtypes, name, None) or name)


DTYPES: Final[tuple[DType, ...]] = tuple(_dtype(name) for name in NAMES)
CODES: Final[dict[DType, int]] = {dtype: code for code, dtype in enumerate(DTYPES)}
BY_NAME: Final[dict[str, DType]] = dict(zip(NAMES, DTYPES, strict=True))
FLOAT32: Final = np.dtype(np.float32)
FLOAT16: Final = BY_NAME["float16"]
BFLOAT16: Final = BY_NAME["bfloat16"]

BLOCK: Final = 32
# One byte of a payload of blocks: see `mxint8` and `mxfp4`. No array has these dtypes, so they are in no table above.
MXINT8: Final = np.dtype([("mxint8", np.uint8)])
MXFP4: Final = np.dtype([("mxfp4", np.uint8)])
IN_BLOCKS: Final[dict[DType, str]] = {MXINT8: "mxint8", MXFP4: "mxfp4"}
_BLOCK_CODES: Final = {128: MXINT8, 129: MXFP4}
PAYLOADS: Final[dict[int, DType]] = {**dict(enumerate(DTYPES)), **_BLOCK_CODES}
PAYLOAD_CODES: Final[dict[DType, int]] = {dtype: code for code, dtype in PAYLOADS.items()}
WIRES: Final[dict[str, DType]] = {
    "float32": FLOAT32, "bfloat16": BFLOAT16, "mxint8": MXINT8, "mxfp4": MXFP4,
    "mxint8-both": MXINT8, "mxfp4-both": MXFP4,
}  # fmt: skip
"""What a group may round float32 contributions to; with "-both", results of all-reduces as well."""

# Looked up by value, because a copy of a dtype, such as `newbyteorder` makes, claims not to be built in.
CARRIERS: Final = {dtype: dtype if dtype.isbuiltin == 1 else np.dtype(f"u{dtype.itemsize}") for dtype in DTYPES}

_FLOATS: Final = frozenset(n for n in NAMES if n.startswith(("float", "bfloat")))
_COMPLEX: Final = frozenset({"complex64", "complex128"})
_INTEGERS: Final = frozenset(n for n in NAMES if n.startswith(("int", "uint")))

OPS: Final = ("sum", "avg", "min", "max", "prod", "band", "bor", "bxor")  # the position is the code in frames

# Kinds beside the codes of single dtypes, for data that only moves: each rank may choose its own width.
FLOAT_KIND: Final = 200
COMPLEX_KIND: Final = 201


def name_of(dtype: DType) -> str:
    """hostring's name of a numpy dtype. Raises `TypeError` for one that can't travel."""
    code = CODES.get(dtype)
    if code is None:
        raise TypeError(f"dtype {dtype} can't travel; use one of {', '.join(NAMES)}")
    return NAMES[code]


def wire_dtype(dtype: DType) -> DType:
    """The dtype that a reduction of `dtype` computes in: float32 for floats of 32 bits or less, else `dtype` itself."""
    return FLOAT32 if name_of(dtype) in _FLOATS and dtype.itemsize <= 4 else dtype


WIRE_DTYPES: Final = {dtype: wire_dtype(dtype) for dtype in DTYPES}


def carrier(dtype: DType) -> DType:
    """A dtype of the same width whose arrays are buffers: numpy can't lend ml_dtypes' arrays to a socket."""
    found = CARRIERS.get(dtype)
    return carrier(BY_NAME[name_of(dtype)]) if found is None else found


def unit_of(wire: str) -> int:
    """Elements of a float32 contribution that are rounded together, and must stay together."""
    return BLOCK if WIRES[wire] in IN_BLOCKS else 1


def rounds_results(wire: str) -> bool:
    """Whether results of all-reduces are rounded to the same blocks as contributions."""
    return wire.endswith("-both")


def nbytes_of(n_elements: int, payload: DType) -> int:
    """Bytes that a payload of `n_elements` takes."""
    if payload not in IN_BLOCKS:
        return n_elements * payload.itemsize
    return element_nbytes(n_elements, payload) + -(-n_elements // BLOCK)


def element_nbytes(n_elements: int, payload: DType) -> int:
    """Bytes of the elements alone in a payload of blocks, which the scales follow."""
    return -(-n_elements // 2) if payload == MXFP4 else n_elements


def kind_code(dtype: DType) -> int:
    """What data movement compares: all floats are one kind, all complex another, everything else only itself."""
    name = name_of(dtype)
    if name in _FLOATS:
        return FLOAT_KIND
    return COMPLEX_KIND if name in _COMPLEX else CODES[dtype]


def kind_name(code: int) -> str:
    """The words for a `kind_code`, for error messages."""
    if code == FLOAT_KIND:
        return "a float dtype"
    if code == COMPLEX_KIND:
        return "a complex dtype"
    return NAMES[code] if code < len(NAMES) else f"unknown dtype code {code}"


def check_op(op: str, dtype: DType) -> None:
    """Refuse what a reduction can't do, before a byte moves.

    Raises:
        ValueError: `op` is not an operator.
        TypeError: `op` has no meaning for `dtype`.
    """
    if op not in OPS:
        raise ValueError(f"op={op!r} is not an operator; use one of {', '.join(OPS)}")
    name = name_of(dtype)
    if name in _FLOATS and op.startswith("b"):
        raise TypeError(f"op={op!r} works on bits, and {name} is a float dtype; use an integer or bool array")
    if name in _COMPLEX and op not in ("sum", "avg", "prod"):
        raise TypeError(f"op={op!r} has no order to go by on {name}; sum, avg and prod are possible")
    if op == "avg" and (name in _INTEGERS or name == "bool"):
        raise TypeError(f"op='avg' would need a rounding rule on {name}; use op='sum' and divide, or a float array")
