"""Fixtures for all tests, and how hypothesis runs."""

from __future__ import annotations

import os
import signal
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

# Ranks and test workers share the cores. More threads in each would only spin. numpy and torch read this when imported.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import hypothesis
import pytest
import ranks
from two_hosts import Hosts

# How long an example takes depends on the machine, not on what is tested.
hypothesis.settings.register_profile("hostring", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow])
hypothesis.settings.load_profile("hostring")

# A script that runs in the background ignores SIGINT, and processes that tests start would inherit that.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """With HOSTRING_TEST_RERUNS=2, tests of the marker `faults` have three chances. All others have one."""
    reruns = int(os.environ.get("HOSTRING_TEST_RERUNS", "0"))
    for item in items:
        if reruns and item.get_closest_marker("faults"):
            item.add_marker(pytest.mark.flaky(reruns=reruns, reruns_delay=1))


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


@pytest.fixture
def no_file_of_the_user(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No tuning that the user has saved is found."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("HOSTRING_TUNING", raising=False)


@pytest.fixture(scope="module")
def hosts() -> Iterator[Hosts]:
    """Two hosts joined by a cable."""
    made = Hosts()
    try:
        made.up()
    except (OSError, subprocess.SubprocessError) as exc:
        made.down()
        pytest.skip(f"no network namespaces here: {exc}")
    yield made
    made.down()
