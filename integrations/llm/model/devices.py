"""Where a rank computes: on the host's processor, or on an accelerator that torch finds here."""

from __future__ import annotations

import os
from functools import lru_cache

import torch

from hostring.group.environment import launched


def find_device(wanted: str | torch.device, local_rank: int | None = None) -> torch.device:
    """The device that is meant.

    Args:
        wanted: torch's name for it, with or without a number: "cpu", "cuda" (which is also ROCm), "cuda:1", "mps",
            "xpu".
            "auto" is an accelerator, or the CPU where there is none.
        local_rank: of this process among those of this host, which share its accelerators out by "auto". By default
            what the
            launcher said; 0 where none did.

    Raises:
        ValueError: there is no such device here; says which there are.
    """
    if wanted == "auto":
        return _share(local_rank)
    try:
        device = torch.device(wanted)
    except RuntimeError:
        raise ValueError(f"device {wanted!r} is unknown to torch; {_instead()}") from None
    if str(device) != str(wanted) or (device.index or 0) >= _count(device.type):  # torch takes "cuda:256" for "cuda:0"
        raise ValueError(f"there is no device {str(wanted)!r} here; {_instead()}")
    return device


def _share(local_rank: int | None) -> torch.device:
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is None:
        return torch.device("cpu")
    there = _count(accelerator.type)
    if local_rank is None:
        place = launched(os.environ)
        local_rank = (place and place.local_rank) or 0
    return torch.device(accelerator.type, local_rank % there) if there > 1 else accelerator


def _count(kind: str) -> int:
    """How many devices of this type there are."""
    module = getattr(torch, kind, None)
    is_available = getattr(module, "is_available", None)
    return int(module.device_count()) if module is not None and is_available is not None and is_available() else 0


def _instead() -> str:
    """What there is, and what to try."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is None:
        return (
            f"torch {torch.__version__} finds no accelerator: take cpu, or install the driver of yours "
            f"and the build of torch for it"
        )
    there = ", ".join(f"{accelerator.type}:{i}" for i in range(_count(accelerator.type)))
    return f"torch {torch.__version__} finds cpu, {there}: take one of these, or auto"


@lru_cache
def sums_wide(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether an accelerator multiplies matrices of a 16-bit dtype into f32 sums. Found out with sums that f16 can't
    hold."""
    if device.type == "cpu" or dtype == torch.float32:
        return False
    x = torch.full((16, 16), 256.0, dtype=dtype, device=device)
    try:
        sums = torch.mm(x, x, out_dtype=torch.float32)
    except RuntimeError:  # of which NotImplementedError is one
        return False
    return bool((sums == 16 * 256.0**2).all())
