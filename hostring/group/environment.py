"""What launchers put into the environment of the processes that they start."""

from __future__ import annotations

import hashlib
import itertools
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

DEFAULT_PORT = 29500
"""Where ranks meet when MASTER_ADDR comes without MASTER_PORT; torch uses the same."""

_LAUNCHERS = ("hydra_pmi_proxy", "prterun", "prted", "prte", "orted", "mpirun", "mpiexec", "mpiexec.hydra")


@dataclass(frozen=True)
class Launched:
    """This process's place among those that a launcher started.

    Attributes:
        by: the launcher, for messages.
        rank, world_size: among all.
        local_rank: among those of this host; None when unknown.
        host, port: where the ranks meet; host is None when unknown.
        job: names this launch. It is the same on all ranks of this host; None when unknown.
        one_host: all ranks run on this host.
    """

    by: str
    rank: int
    world_size: int
    local_rank: int | None = None
    host: str | None = None
    port: int = DEFAULT_PORT
    job: str | None = None
    one_host: bool = False


def launched(environ: Mapping[str, str]) -> Launched | None:
    """This process's place, as torchrun, `hostring launch`, Open MPI, MPICH or SLURM set it. None without a launcher.

    Raises:
        ValueError: variables are missing or malformed.
    """
    for recognise in (_torchrun, _open_mpi, _mpich, _slurm):
        found = recognise(environ)
        if found is not None:
            return found
    return None


def number(environ: Mapping[str, str], name: str, lowest: int, highest: int | None = None) -> int:
    """An integer variable.

    Raises:
        ValueError: not a number, or out of range.
    """
    text = environ[name].strip()
    limits = f"from {lowest} up" if highest is None else f"from {lowest} to {highest}"
    if not re.fullmatch(r"-?[0-9]{1,9}", text) or int(text) < lowest or (highest is not None and int(text) > highest):
        raise ValueError(f"{name}={text!r} is not a number {limits}")
    return int(text)


def _optional(environ: Mapping[str, str], name: str) -> int | None:
    return number(environ, name, 0) if environ.get(name, "").strip() else None


def _place(environ: Mapping[str, str], rank: str, world_size: str) -> tuple[int, int]:
    if not environ.get(world_size, "").strip():
        raise ValueError(f"{rank} is set but {world_size} is not; set both, or neither for a world of one")
    n = number(environ, world_size, 1)
    return number(environ, rank, 0, n - 1), n


def _port(environ: Mapping[str, str]) -> int:
    return number(environ, "MASTER_PORT", 1, 65535) if environ.get("MASTER_PORT", "").strip() else DEFAULT_PORT


def _torchrun(environ: Mapping[str, str]) -> Launched | None:
    if not environ.get("RANK", "").strip():
        if not environ.get("WORLD_SIZE", "").strip() or number(environ, "WORLD_SIZE", 1) == 1:
            return None
        raise ValueError("WORLD_SIZE is set but RANK is not; set both, or neither for a world of one")
    rank, world_size = _place(environ, "RANK", "WORLD_SIZE")
    return Launched(
        "RANK and WORLD_SIZE",
        rank,
        world_size,
        _optional(environ, "LOCAL_RANK"),
        environ.get("MASTER_ADDR") or None,
        _port(environ),
    )


def _open_mpi(environ: Mapping[str, str]) -> Launched | None:
    if "OMPI_COMM_WORLD_RANK" not in environ:
        return None
    rank, world_size = _place(environ, "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE")
    local_size = _optional(environ, "OMPI_COMM_WORLD_LOCAL_SIZE")
    job = environ.get("PMIX_NAMESPACE") or environ.get("OMPI_MCA_ess_base_jobid")
    return _mpi(
        "Open MPI", environ, rank, world_size, _optional(environ, "OMPI_COMM_WORLD_LOCAL_RANK"), local_size, job
    )


def _mpich(environ: Mapping[str, str]) -> Launched | None:
    if "PMI_RANK" not in environ or ("MPI_LOCALRANKID" not in environ and "SLURM_PROCID" in environ):
        return None  # SLURM sets PMI_RANK as well, and knows more
    rank, world_size = _place(environ, "PMI_RANK", "PMI_SIZE")
    return _mpi(
        "MPICH",
        environ,
        rank,
        world_size,
        _optional(environ, "MPI_LOCALRANKID"),
        _optional(environ, "MPI_LOCALNRANKS"),
        None,
    )


def _mpi(
    by: str,
    environ: Mapping[str, str],
    rank: int,
    world_size: int,
    local_rank: int | None,
    local_size: int | None,
    job: str | None,
) -> Launched:
    host = environ.get("MASTER_ADDR") or None
    return Launched(
        by, rank, world_size, local_rank, host, _port(environ), job or _launcher_process(), local_size == world_size
    )


def _slurm(environ: Mapping[str, str]) -> Launched | None:
    if "SLURM_PROCID" not in environ or "SLURM_NTASKS" not in environ:
        return None
    in_step = "SLURM_STEP_ID" in environ or "SLURM_STEPID" in environ
    if not in_step and environ.get("ENVIRONMENT") == "BATCH":
        return None  # the batch script itself, which srun did not start: it runs once, whatever the number of tasks
    size = "SLURM_STEP_NUM_TASKS" if environ.get("SLURM_STEP_NUM_TASKS") else "SLURM_NTASKS"
    rank, world_size = _place(environ, "SLURM_PROCID", size)
    nodes = environ.get("SLURM_STEP_NUM_NODES") or environ.get("SLURM_NNODES")
    names = environ.get("SLURM_STEP_NODELIST") or environ.get("SLURM_JOB_NODELIST") or environ.get("SLURM_NODELIST")
    host = (
        environ.get("MASTER_ADDR")
        or ("127.0.0.1" if nodes == "1" else None)
        or (next(expand_hosts(names)) if names else None)
    )
    port = _port(environ) if environ.get("MASTER_PORT") else slurm_port(environ)
    return Launched("SLURM", rank, world_size, _optional(environ, "SLURM_LOCALID"), host, port, one_host=nodes == "1")


def slurm_port(environ: Mapping[str, str]) -> int:
    """A port that two jobs or steps on one node rarely share, above the range of ephemeral ports."""
    job = environ.get("SLURM_JOB_ID") or environ.get("SLURM_JOBID") or "0"
    step = environ.get("SLURM_STEP_ID") or environ.get("SLURM_STEPID") or "0"
    digits = [int(text) if text.isdigit() else 0 for text in (job, step)]
    return 61440 + (digits[0] + 1009 * digits[1]) % 4096


def expand_hosts(names: str) -> Iterator[str]:
    """The hosts of a SLURM list, one by one: "gpu[01-03,7],login" gives gpu01, gpu02, gpu03, gpu7, login."""
    for item in re.findall(r"(?:[^,\[\]]|\[[^\]]*\])+", names):
        pieces = [_alternatives(piece) for piece in re.split(r"(\[[^\]]*\])", item.strip()) if piece]
        yield from map("".join, itertools.product(*pieces))


def _alternatives(piece: str) -> list[str]:
    if not piece.startswith("["):
        return [piece]
    found: list[str] = []
    for item in piece[1:-1].split(","):
        first, dash, last = item.partition("-")
        if not dash:
            found.append(first)
        elif first.isdigit() and last.isdigit():
            found += [f"{n:0{len(first)}d}" for n in range(int(first), min(int(last), int(first) + 65535) + 1)]
        else:
            raise ValueError(f"{item!r} in a list of hosts is not a range of numbers")
    return found


def _launcher_process() -> str:
    """Names the process that started all ranks of this host: the nearest MPI launcher above this one, else the parent.

    There may be a wrapper script between the two. The start time tells the process from an earlier one with its number.
    """
    pid = os.getppid()
    parent = f"process-{pid}-{_stat(pid)[2]}"
    while pid > 1:
        name, above, started = _stat(pid)
        if name in _LAUNCHERS or name in [launcher[:15] for launcher in _LAUNCHERS]:
            return f"process-{pid}-{started}"
        pid = above
    return parent


def _stat(pid: int) -> tuple[str, int, str]:
    """Name (at most 15 characters), parent and start time of a process; empty where the system doesn't tell."""
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
            head, _, tail = file.read().rpartition(")")
    except OSError:
        return "", 0, ""
    fields = tail.split()
    return head.partition("(")[2], int(fields[1]), fields[19]


def job_key(job: str) -> str:
    """`job` as part of a file name."""
    return hashlib.sha256(job.encode()).hexdigest()[:24]
