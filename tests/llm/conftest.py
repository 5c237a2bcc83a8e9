"""Fixtures for the tests of the language model."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import pytest


@pytest.fixture(scope="module")
def worker() -> Iterator[Callable[..., Any]]:
    """Calls functions in a process where the stand-in is the accelerator."""
    from stand_in import beside_a_stand_in

    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        yield lambda fn, *args, **kwargs: pool.submit(beside_a_stand_in, fn, args, kwargs).result(timeout=60)
