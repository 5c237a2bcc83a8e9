"""Fixtures for all tests, and how hypothesis runs."""

from __future__ import annotations

import signal
import tempfile
from collections.abc import Callable, Iterator
from typing import Any

import hypothesis
import pytest
import ranks

# How long an example takes depends on the machine, not on what is tested.
hypothesis.settings.register_profile("hostring", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow])
hypothesis.settings.load_profile("hostring")

# A script that runs in the background ignores SIGINT, and processes that tests start would inherit that.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture
def run_ranks() -> Callable[..., list[Any]]:
    """`run_ranks(world_size, fn, **init_kwargs)`: ranks as threads, over memory unless `transport=` says otherwise."""
    return ranks.in_threads


@pytest.fixture
def run_processes() -> Callable[..., list[tuple[str, Any]]]:
    """`run_processes(world_size, fn, **init_kwargs)`: ranks as spawned processes over TCP."""
    return ranks.in_processes


@pytest.fixture
def own_folder(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A folder for temporary files of this test alone. Its path is short, because that of a socket must be."""
    tmp_path_factory.getbasetemp()  # pytest's own folder must not be made in there
    with tempfile.TemporaryDirectory(prefix="t") as folder:
        monkeypatch.setattr(tempfile, "tempdir", folder)
        yield
