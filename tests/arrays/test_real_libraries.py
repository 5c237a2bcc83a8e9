"""Ranks with arrays of numpy, torch, JAX and MLX in one group: the real libraries, on the CPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from oracle import as_library, bits, fold_in_order, host, rank_distinct

from hostring.arrays.dtypes import BY_NAME

LIBRARIES = ("numpy", "torch", "jax", "mlx")
DTYPES = {
    "float32": ("float32",) * 4,
    "float16": ("float16",) * 4,
    "bfloat16": ("bfloat16",) * 4,
    "mixed": ("float32", "bfloat16", "float16", "bfloat16"),
    "int32": ("int32",) * 4,
    "bool": ("bool",) * 4,
}


def library(name: str) -> Any:
    pytest.importorskip("torch")
    return {"jax": lambda: pytest.importorskip("jax.numpy"), "mlx": lambda: pytest.importorskip("mlx.core")}[name]()


def made(values: np.ndarray, name: str) -> Any:
    """`values` as an array of library `name`."""
    if name in ("numpy", "torch"):
        return as_library(values, name)
    if name == "jax":
        return library("jax").asarray(values)
    return library("mlx").array(values)


def read(x: Any) -> np.ndarray:
    """Any library's array as numpy's, by the library's own means."""
    if type(x).__module__.startswith("mlx"):
        mx = library("mlx")
        return np.array(x.view(mx.uint16)).view(BY_NAME["bfloat16"]) if x.dtype == mx.bfloat16 else np.array(x)
    return np.asarray(x) if type(x).__module__.startswith("jax") else host(x)


@pytest.fixture(scope="module", autouse=True)
def _all_libraries() -> None:
    library("jax")
    library("mlx")


@pytest.mark.parametrize("kind", DTYPES)
def test_unlike_libraries_in_one_group(run_ranks: Callable[..., list[Any]], kind: str) -> None:
    names = DTYPES[kind]
    rows = [row.reshape(3, 4) for row in (rank_distinct(4, 12, BY_NAME[name])[r] for r, name in enumerate(names))]
    wide = [row.reshape(-1) if kind in ("int32", "bool") else row.reshape(-1).astype(np.float32) for row in rows]
    with np.errstate(all="ignore"):
        total = fold_in_order("rank", wide, np.logical_or if kind == "bool" else np.add).reshape(3, 4)

    def body(comm: Any) -> Any:
        mine = rows[comm.rank]
        results = []
        x = made(mine, LIBRARIES[comm.rank])
        for result in (comm.all_reduce(x), comm.broadcast(made(mine, LIBRARIES[comm.rank]), 3)):
            assert type(result) is type(x)
            assert result.dtype == x.dtype
            results.append(read(result).copy())
        gathered = comm.all_gather(made(mine, LIBRARIES[comm.rank]))
        assert type(gathered) is type(x)
        results.append(read(gathered))
        if comm.rank % 2:
            comm.send(made(mine, LIBRARIES[comm.rank]), comm.rank - 1)
        else:
            results.append(read(comm.recv(x, comm.rank + 1)))
        return results

    for rank, results in enumerate(run_ranks(4, body)):
        own = rows[rank].dtype
        with np.errstate(all="ignore"):
            expected = [total.astype(own), rows[3].astype(own), np.stack([row.astype(own) for row in rows])]
            expected += [rows[rank + 1].astype(own)] if rank % 2 == 0 else []
        for result, correct in zip(results, expected, strict=True):
            assert result.shape == correct.shape
            assert bits(result) == bits(correct)


def test_every_dtype_that_mlx_and_jax_share_with_numpy(run_ranks: Callable[..., list[Any]]) -> None:
    mx, jnp = library("mlx"), library("jax")
    both = [
        name
        for name in BY_NAME
        if hasattr(mx, name.replace("bool", "bool_")) and hasattr(jnp, name.replace("bool", "bool_"))
    ]
    both = [
        name for name in both if name not in ("float64", "int64", "uint64")
    ]  # JAX keeps 32 bits of those by default
    assert {"bfloat16", "float16", "complex64", "int8", "bool"} <= set(both)

    def body(comm: Any) -> Any:
        for name in both:
            row = rank_distinct(2, 8, BY_NAME[name])
            got = comm.all_gather(made(row[comm.rank], ("jax", "mlx")[comm.rank]))
            assert bits(read(got)) == bits(np.stack(row)), name
        return True

    assert run_ranks(2, body) == [True, True]


@pytest.mark.parametrize("transform", ["jit", "grad", "vmap"])
def test_a_jax_tracer_is_refused_in_words(run_ranks: Callable[..., list[Any]], transform: str) -> None:
    import jax

    def body(comm: Any) -> Any:
        function = getattr(jax, transform)(lambda x: comm.all_reduce(x).sum())
        with pytest.raises(TypeError, match=r"tracer.*outside of the traced function"):
            function(jax.numpy.ones((2, 2))) if transform != "grad" else function(jax.numpy.ones(2))
        return comm.all_reduce(np.ones(2)).tolist()

    assert run_ranks(2, body) == [[2.0, 2.0]] * 2


def test_an_mlx_array_in_a_compiled_function_ends_the_call_on_all_ranks(run_ranks: Callable[..., list[Any]]) -> None:
    mx = library("mlx")

    def body(comm: Any) -> Any:
        def call_after_all_have_started() -> None:
            comm.barrier()
            if comm.rank == 1:
                mx.compile(lambda x: comm.all_reduce(x))(mx.ones(4))
            else:
                comm.all_reduce(np.ones(4, np.float32))

        kind, words = (
            (TypeError, "can't be read") if comm.rank == 1 else (RuntimeError, "rank 1 left a call by TypeError.*read")
        )
        with pytest.raises(kind, match=words):
            call_after_all_have_started()
        return True

    assert run_ranks(3, body) == [True] * 3
