"""The table of transports: one row and one module are all that a new transport needs."""

from __future__ import annotations

import sys
import types
from typing import Any

import numpy as np
import pytest
from ranks import in_threads

import hostring
from hostring.rendezvous import MemoryStore
from hostring.transports import tcp
from hostring.transports.registry import TRANSPORTS, Transport


@pytest.mark.parametrize("name", TRANSPORTS)
def test_every_row_has_its_module(name: str) -> None:
    row = TRANSPORTS[name]
    module: Any = row.load()
    for function in ("listen", "usable", "make_links", *(["unsupported"] if row.instead else [])):
        assert callable(getattr(module, function)), function
    assert not row.instead or row.instead in TRANSPORTS


def test_a_new_transport_is_a_module_and_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """Links of its own, over sockets that listen where TCP's do."""
    made: list[tuple[int, str]] = []

    def make_links(met: Any) -> Any:
        made.extend(met.keys)
        return tcp.make_links(met)

    module = types.ModuleType("hostring.transports.pigeon")
    module.__dict__.update(listen=tcp.listen, usable=tcp.usable, make_links=make_links)
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setitem(TRANSPORTS, "pigeon", Transport("pigeon", "pigeon"))
    inputs = [np.arange(5, dtype=np.float32) * (r + 1) for r in range(3)]

    got = in_threads(3, lambda comm: comm.all_reduce(inputs[comm.rank].copy()), transport="pigeon")
    for x in got:
        np.testing.assert_array_equal(x, (inputs[0] + inputs[1]) + inputs[2])
    assert len(made) == 3 * 2 * 3  # ranks, peers, kinds


def test_a_machine_without_a_transport_is_told_what_to_use(monkeypatch: pytest.MonkeyPatch) -> None:
    module = types.ModuleType("hostring.transports.pigeon")
    module.__dict__.update(unsupported=lambda: "there is no loft")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setitem(TRANSPORTS, "pigeon", Transport("pigeon", "pigeon", instead="tcp"))
    with pytest.raises(ValueError, match="transport='pigeon': there is no loft; use transport='tcp'"):
        hostring.init(0, 2, transport="pigeon", store=MemoryStore())
