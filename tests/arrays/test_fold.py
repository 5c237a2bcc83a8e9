"""The fold of two arrays: the bits of an element depend on its two operands alone, and on nothing else."""

from __future__ import annotations

import functools
import itertools
import warnings

import numpy as np
import pytest
from oracle import bits

from hostring.arrays.dtypes import DTYPES, OPS, check_op, wire_dtype
from hostring.arrays.fold import divide, fold_functions

LENGTHS = (1, 2, 3, 5, 8, 9, 17, 33, 65)


def nan(dtype: type, payload: int, negative: bool = False) -> np.generic:
    whole, exponent, sign = {np.float32: (np.uint32, 0x7F800000, 31), np.float64: (np.uint64, 0x7FF << 52, 63)}[dtype]
    return np.array(exponent | payload | negative << sign, whole).view(dtype)[()]


def special(dtype: type) -> list[np.generic]:
    quiet = 1 << (22 if dtype is np.float32 else 51)
    nans = [nan(dtype, quiet), nan(dtype, quiet | 5), nan(dtype, 7), nan(dtype, quiet | 9, True)]
    tiny = np.nextafter(dtype(0), dtype(1))
    return [dtype(v) for v in (0.0, -0.0, 1.0, -3.3, np.inf, -np.inf, tiny, -tiny)] + [np.finfo(dtype).max, *nans]


def everywhere(fold, a: np.generic, b: np.generic) -> set[bytes]:
    """The bytes of a fold b at all places of arrays of many lengths, offsets, and with all ways of reusing memory."""
    seen = set()
    for length, offset in itertools.product(LENGTHS, (0, 1)):
        left, right = np.full(length + offset, a)[offset:], np.full(length + offset, b)[offset:]
        for reuse in ("neither", "left", "right"):
            x, y = left.copy(), right.copy()
            out = {"neither": np.empty_like(x), "left": x, "right": y}[reuse]
            fold(x, y, out)
            seen |= {v.tobytes() for v in out}
    return seen


@pytest.mark.parametrize("op", ["sum", "prod", "min", "max"])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_bits_do_not_depend_on_the_position(dtype, op):
    _, last = fold_functions(op, np.dtype(dtype))
    for a, b in itertools.product(special(dtype), repeat=2):
        assert len(everywhere(last, a, b)) == 1, f"{a!r} {op} {b!r}"


@pytest.mark.parametrize("op", ["sum", "prod"])
@pytest.mark.parametrize("dtype", [np.complex64, np.complex128])
def test_bits_of_complex_numbers_do_not_depend_on_the_position(dtype, op):
    rng = np.random.default_rng(3)
    _, last = fold_functions(op, np.dtype(dtype))
    values = [dtype(complex(*rng.standard_normal(2))) for _ in range(6)]
    values += [dtype(complex(x, y)) for x, y in ((np.nan, 1), (np.inf, 1), (np.inf, -np.inf), (0.0, -0.0))]
    for a, b in itertools.product(values, repeat=2):
        assert len(everywhere(last, a, b)) == 1, f"{a!r} {op} {b!r}"


@pytest.mark.parametrize("op", ["sum", "prod", "min", "max"])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_every_nan_is_the_plain_one(dtype, op):
    _, last = fold_functions(op, np.dtype(dtype))
    plain = np.array(np.nan, dtype).tobytes()
    assert plain[-1] == 0x7F
    nans = [x for x in special(dtype) if np.isnan(x)]
    for a, b in [*itertools.product(nans, special(dtype)), *itertools.product(special(dtype), nans)]:
        assert everywhere(last, a, b) == {plain}
    if op == "sum":
        assert everywhere(last, dtype(np.inf), dtype(-np.inf)) == {plain}
    if op == "prod":
        assert everywhere(last, dtype(np.inf), dtype(0)) == {plain}


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("n_elements", [5, 20_000])
def test_one_nan_is_found_wherever_it_is(dtype, n_elements):
    _, last = fold_functions("sum", np.dtype(dtype))
    for at in (0, n_elements // 2, n_elements - 1):
        x = np.full(n_elements, np.finfo(dtype).max)
        x[at] = nan(dtype, 77)
        last(x, np.ones(n_elements, dtype), x)
        assert bits(x[at]) == bits(np.array(np.nan, dtype))
        assert np.isnan(x).sum() == 1


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_zeros_are_ordered_by_their_sign(dtype):
    plus, minus = dtype(0.0), dtype(-0.0)
    for which in (0, 1):
        least, most = fold_functions("min", np.dtype(dtype))[which], fold_functions("max", np.dtype(dtype))[which]
        for a, b in ((plus, minus), (minus, plus)):
            assert everywhere(least, a, b) == {minus.tobytes()}
            assert everywhere(most, a, b) == {plus.tobytes()}
        assert everywhere(least, minus, minus) == everywhere(most, minus, minus) == {minus.tobytes()}
        assert everywhere(least, minus, dtype(1)) == {minus.tobytes()}
        assert everywhere(most, minus, dtype(-1)) == {minus.tobytes()}


@pytest.mark.parametrize("dtype", [np.complex64, np.complex128])
def test_a_complex_product_rounds_every_real_operation(dtype):
    rng = np.random.default_rng(4)
    a, b = (np.array(rng.standard_normal(999) + 1j * rng.standard_normal(999), dtype) for _ in range(2))
    out = np.empty_like(a)
    fold_functions("prod", np.dtype(dtype))[1](a, b, out)
    assert bits(out.real) == bits(a.real * b.real - a.imag * b.imag)
    assert bits(out.imag) == bits(a.real * b.imag + a.imag * b.real)


@pytest.mark.parametrize("dtype", [np.complex64, np.complex128, np.float32, np.float64])
def test_avg_divides_and_rounds_once(dtype):
    x = np.array([1, 2, 5, np.inf, 1e-45, -0.0], dtype)
    if np.dtype(dtype).kind == "c":
        x.imag = x.real[::-1]
        expected = [bits(part / part.dtype.type(3)) for part in (x.real, x.imag)]
        divide(x, 3)
        assert [bits(x.real), bits(x.imag)] == expected
    else:
        expected = bits(x / dtype(3))
        divide(x, 3)
        assert bits(x) == expected


def test_denormals_are_kept():
    tiny = np.full(100, np.nextafter(np.float32(0), np.float32(1)))
    total = np.empty_like(tiny)
    fold_functions("sum", np.dtype(np.float32))[1](tiny, tiny, total)
    assert set(total.view(np.uint32)) == {2}


@pytest.mark.parametrize("n_elements", [3, 20_000])
@pytest.mark.parametrize("which", [0, 1])
def test_overflow_gives_inf_and_neither_warns_nor_raises(n_elements, which):
    huge = np.full(n_elements, np.finfo(np.float32).max)
    for op, errors in itertools.product(("sum", "prod"), ("raise", "warn")):
        out = np.zeros_like(huge)
        with warnings.catch_warnings(), np.errstate(all=errors):
            warnings.simplefilter("error")
            fold_functions(op, np.dtype(np.float32))[which](huge, huge, out)
        assert np.isinf(out).all()


def test_integers_wrap_and_bools_are_logical():
    int8 = np.dtype(np.int8)
    out = np.empty(2, np.int8)
    fold_functions("sum", int8)[1](np.array([127, -128], np.int8), np.array([1, -1], np.int8), out)
    assert out.tolist() == [-128, 127]
    a, b = np.array([False, False, True, True]), np.array([False, True, False, True])
    table = {"sum": a | b, "max": a | b, "bor": a | b, "prod": a & b, "min": a & b, "band": a & b, "bxor": a ^ b}
    for op, expected in table.items():
        result = np.empty(4, bool)
        fold_functions(op, np.dtype(bool))[0](a, b, result)
        assert result.tolist() == expected.tolist(), op


def allowed() -> list[tuple[np.dtype, str]]:
    def possible(dtype: np.dtype, op: str) -> bool:
        try:
            check_op(op, dtype)
        except TypeError:
            return False
        return True

    return [(dtype, op) for dtype, op in itertools.product(DTYPES, OPS) if possible(dtype, op)]


def test_the_table_of_dtypes_and_operators():
    """As documented: bits for integers and bool, order for all but complex, avg for floats and complex."""
    names = {"i": "integers", "u": "integers", "b": "bool", "c": "complex"}
    table: dict[str, set[str]] = {}
    for dtype, op in allowed():
        table.setdefault(names.get(dtype.kind, "floats"), set()).add(op)
    assert table == {
        "bool": {"sum", "prod", "min", "max", "band", "bor", "bxor"},
        "integers": {"sum", "prod", "min", "max", "band", "bor", "bxor"},
        "floats": {"sum", "avg", "prod", "min", "max"},
        "complex": {"sum", "avg", "prod"},
    }
    assert functools.reduce(set.union, table.values()) == set(OPS)


@pytest.mark.parametrize(("dtype", "op"), [(d, o) for d, o in allowed() if wire_dtype(d) == d])
def test_everything_that_is_allowed_can_be_folded(dtype, op):
    ones = np.ones(3, dtype)
    out = np.zeros(3, dtype)
    for fold in fold_functions(op, dtype):
        fold(ones, ones, out)
    expected = 2 if op in ("sum", "avg") and dtype.kind != "b" else 0 if op == "bxor" else 1
    assert out.tolist() == np.full(3, expected, dtype).tolist()
