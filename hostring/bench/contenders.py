"""What is measured: hostring with one topology and transport, or gloo by torch.distributed, under one interface."""

from __future__ import annotations

import importlib
import socket
from collections.abc import Callable
from typing import Any, Protocol

import numpy as np

import hostring
from hostring.bench.cases import Case
from hostring.bench.truth import Array

Call = Callable[[int], Any]  # one call with root i; returns the result where there is one


class Contender(Protocol):
    """One implementation of the collectives, with a group of all ranks.

    Attributes:
        label: names it in the table.
        exact: it promises the declared bits, and not only a sum within rounding.
        wire: see `hostring.init`.
    """

    label: str
    exact: bool
    wire: str

    def bind(self, case: Case, x: Array) -> Call:
        """A function that runs `case` on this rank's `x`, a numpy array."""

    def schedule(self, case: Case) -> str:
        """The schedule that runs this case, for the table."""

    def waited_for(self) -> dict[int, float]:
        """Seconds of waiting so far, by the rank that was waited for; empty when this is unknown."""

    def close(self) -> None: ...


class Hostring:
    """A hostring group with the links of one topology. Closed by `close`."""

    exact = True

    def __init__(self, label: str, comm: hostring.Comm, array: str = "numpy") -> None:
        self.label, self.wire, self.comm, self._array = label, comm.wire, comm, array

    def bind(self, case: Case, x: Array) -> Call:
        comm = self.comm
        brought = x if self._array == "numpy" else _tensor(x)
        if case.collective in ("all_reduce", "reduce"):
            op = case.op
            return (
                (lambda i: comm.all_reduce(brought, op))
                if case.collective == "all_reduce"
                else lambda i: comm.reduce(brought, i, op)
            )
        if case.collective == "reduce_scatter":
            return lambda i: comm.reduce_scatter(brought, case.op)
        if case.collective == "scatter":
            part = brought[: case.n_elements // case.world_size] * 0
            parts = brought.reshape(case.world_size, -1)
            return lambda i: comm.scatter(parts, i, out=part)
        if case.collective == "send_recv":
            return _shift(comm, brought)
        calls: dict[str, Call] = {
            "broadcast": lambda i: comm.broadcast(brought, i),
            "all_gather": lambda i: comm.all_gather(brought),
            "gather": lambda i: comm.gather(brought, i),
            "all_to_all": lambda i: comm.all_to_all(brought),
            "barrier": lambda i: comm.barrier(),
        }
        return calls[case.collective]

    def schedule(self, case: Case) -> str:
        if case.collective == "send_recv" or case.world_size == 1:
            return "-"
        wide = case.dtype.kind not in "biuc" and (
            case.collective in ("all_reduce", "reduce", "reduce_scatter") or case.dtype.itemsize <= 4
        )
        itemsize = max(4, case.dtype.itemsize) if wide else case.dtype.itemsize
        share = case.world_size if case.collective in ("all_gather", "gather") else 1
        return self.comm.session.tuner.choose(case.collective, case.n_elements // share * itemsize, itemsize).name

    def waited_for(self) -> dict[int, float]:
        return dict(self.comm.counters.waited_for)

    def close(self) -> None:
        self.comm.close()


def _tensor(x: Array) -> Any:
    import torch

    if x.dtype.isbuiltin == 1:
        return torch.from_numpy(x)
    return torch.from_numpy(x.view(f"i{x.dtype.itemsize}")).view(getattr(torch, x.dtype.name))


def _shift(comm: hostring.Comm, x: Any) -> Call:
    """Every rank sends to the next one and receives from the one before."""
    right, left = (comm.rank + 1) % comm.world_size, (comm.rank - 1) % comm.world_size
    into = x.copy() if isinstance(x, np.ndarray) else x.clone()

    def call(i: int) -> Any:
        sending = comm.send(x, right, async_op=True)
        comm.recv(into, left)
        sending.wait()
        return into

    return call


class Gloo:
    """torch.distributed with its gloo backend, on tensors that share the arrays' memory."""

    exact = False
    label = "gloo"
    wire = "float32"

    def __init__(self, comm: hostring.Comm) -> None:
        dist: Any = importlib.import_module("torch.distributed")
        self._dist, self.rank, self.world_size = dist, comm.rank, comm.world_size
        if comm.rank == 0:
            host = _reachable_host(comm)
            store = dist.TCPStore(host, 0, comm.world_size, True, wait_for_workers=False)
            comm.broadcast_bytes(f"{store.port} {host}".encode())
        else:
            port, host = comm.broadcast_bytes().decode().split(" ")
            store = dist.TCPStore(host, int(port), comm.world_size, False)
        dist.init_process_group("gloo", store=store, rank=comm.rank, world_size=comm.world_size)

    def bind(self, case: Case, x: Array) -> Call:
        import torch

        dist, n, t = self._dist, self.world_size, _tensor(x)
        ops = {
            "sum": "SUM",
            "avg": "SUM",
            "min": "MIN",
            "max": "MAX",
            "prod": "PRODUCT",
            "band": "BAND",
            "bor": "BOR",
            "bxor": "BXOR",
        }
        op = getattr(dist.ReduceOp, ops.get(case.op, "SUM"))
        if case.collective in ("reduce_scatter", "send_recv") or case.op == "avg":
            raise ValueError(f"gloo has no {case.collective} with op={case.op}; leave out --peers gloo")
        parts = list(t.reshape(n, -1)) if case.collective in ("scatter", "all_to_all") else []
        out = [torch.empty_like(t) for _ in range(n)] if case.collective in ("all_gather", "gather") else []
        piece, whole = torch.empty_like(parts[0]) if parts else t, torch.empty_like(t)

        def finished(work: Any, result: Any) -> Any:
            return torch.cat(result) if isinstance(result, list) else result

        calls: dict[str, Call] = {
            "all_reduce": lambda i: finished(dist.all_reduce(t, op), t),
            "reduce": lambda i: finished(dist.reduce(t, i, op), t),
            "broadcast": lambda i: finished(dist.broadcast(t, i), t),
            "all_gather": lambda i: (dist.all_gather(out, t), out)[1],
            "gather": lambda i: (dist.gather(t, out if self.rank == i else None, i), out if self.rank == i else None)[
                1
            ],
            "scatter": lambda i: (dist.scatter(piece, parts if self.rank == i else None, i), piece)[1],
            "all_to_all": lambda i: (dist.all_to_all_single(whole, t), whole)[1],
            "barrier": lambda i: dist.barrier(),
        }
        return calls[case.collective]

    def schedule(self, case: Case) -> str:
        return "-"

    def waited_for(self) -> dict[int, float]:
        return {}

    def close(self) -> None:
        self._dist.destroy_process_group()


def _reachable_host(comm: hostring.Comm) -> str:
    """An address of this rank that the others reach."""
    hosts = [host for host in comm.session.group.hosts if not host.startswith("/")]
    return hosts[0] if hosts else socket.gethostbyname("localhost")


def as_numpy(result: Any, dtype: np.dtype[Any]) -> Array | None:
    """A result of any contender as a flat numpy array."""
    if result is None:
        return None
    if isinstance(result, list):
        return np.concatenate([part for part in (as_numpy(r, dtype) for r in result) if part is not None])
    if isinstance(result, np.ndarray):
        return result.reshape(-1)
    flat = result.reshape(-1)
    if dtype.isbuiltin == 1:
        found: Array = flat.numpy()
        return found
    import torch

    return flat.view({1: torch.int8, 2: torch.int16}[dtype.itemsize]).numpy().view(dtype)
