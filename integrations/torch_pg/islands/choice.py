"""Which library serves the inside of islands, and which ranks form one: arguments, then the environment."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.distributed import distributed_c10d

OFF = "off"
KNOWN = ("auto", "gloo", "nccl", "xccl", "hostring", OFF)

_of_world: list[Choice] = []  # of the default group; its sub-groups take it over


@dataclass(frozen=True)
class Choice:
    """What was asked for.

    Attributes:
        inner: the library inside islands, one of `KNOWN`.
        island_size: so many consecutive ranks form an island; None: the ranks of one host and device vendor.
        strict: whether hostring folds the contributions of all ranks, so that the declared order holds everywhere.
    """

    inner: str
    island_size: int | None = None
    strict: bool = False


def read(options: Any) -> Choice | None:
    """The choice of `options` or the environment; None where there is none, or islands are switched off.

    Raises:
        ValueError: a library that is unknown or that this torch lacks, or a size that is no positive number.
    """
    inner = getattr(options, "inner", None) or os.environ.get("HOSTRING_INNER") or None
    if inner is None or inner == OFF:
        return None
    if inner not in KNOWN:
        raise ValueError(f"inner={inner!r} is no library that hostring can call inside an island; use one of {KNOWN}")
    if inner not in ("auto", "hostring") and not distributed_c10d.is_backend_available(inner):
        raise ValueError(
            f"inner={inner!r}: torch {torch.__version__} was built without it here; use 'auto', which chooses for each "
            "rank, or 'gloo' or 'hostring'"
        )
    size: Any = getattr(options, "island_size", None) or os.environ.get("HOSTRING_ISLAND_SIZE") or None
    if size is not None and (not str(size).isdigit() or int(size) < 1):
        raise ValueError(f"island_size={size!r} is not a number of ranks; use 1 or more, or leave it out")
    strict = getattr(options, "strict", None)
    if strict is None:
        strict = os.environ.get("HOSTRING_STRICT") == "1"
    return Choice(inner, None if size is None else int(size), bool(strict))


def inherited(options: Any, *, is_world: bool) -> Choice | None:
    """As `read`; a sub-group without a choice of its own takes over that of the default group."""
    chosen = read(options)
    if is_world:
        _of_world[:] = [] if chosen is None else [chosen]
    elif chosen is None and getattr(options, "inner", None) != OFF and _of_world:
        return _of_world[0]
    return chosen


def resolved(choice: Choice) -> Choice:
    """`choice` with a name instead of "auto": the library that torch uses for this rank's device."""
    if choice.inner != "auto":
        return choice
    device = device_type()
    name = {"cpu": "gloo", "cuda": "nccl", "xpu": "xccl"}.get(device, "hostring")
    if name != "hostring" and not distributed_c10d.is_backend_available(name):
        name = "hostring"
    return replace(choice, inner=name)


def device_type() -> str:
    """The type of this process's accelerator, or "cpu"."""
    if torch.accelerator.is_available():
        accelerator = torch.accelerator.current_accelerator()
        if accelerator is not None:
            return accelerator.type
    return "cpu"


def vendor() -> str:
    """Whose device this process has: ranks of two vendors can't share a library."""
    kind = device_type()
    if kind == "cuda":
        return "amd" if torch.version.hip else "nvidia"
    return kind
