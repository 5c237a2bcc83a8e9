"""The one place where torch's versions differ.

Up to 2.13 a Python group has to be the whole process group, and C++ can't reach all of its methods. From 2.14 on, Python can
also be the backend behind a device of torch's own process group; ours then registers one that forwards to it.
"""

from __future__ import annotations

import sys
from types import FunctionType
from typing import Any

import torch
from torch._C import _distributed_c10d as c10d

HAS_PYTHON_BACKENDS = hasattr(c10d, "Window")  # 2.14 and later

_libraries: list[Any] = []  # what is registered with a library goes when it goes


def reach_from_cpp() -> None:
    """Before 2.14: let `_c10d_functional.all_gather_into_tensor_out`, which compiled FSDP calls, find Python groups."""
    if HAS_PYTHON_BACKENDS or _libraries:
        return

    def all_gather_into_tensor_out(input: torch.Tensor, group_size: int, group_name: str, *, out: torch.Tensor) -> torch.Tensor:
        resolve: Any = c10d._resolve_process_group
        group = resolve(group_name)
        c10d._register_work(out, group.all_gather_single(out, input, c10d.AllgatherOptions()))
        return out

    open_library: Any = torch.library.Library
    library = open_library("_c10d_functional", "IMPL")
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    for kind in ["cpu"] if accelerator is None else ["cpu", accelerator.type]:
        key = torch._C._dispatch_key_for_device(kind)
        library.impl("all_gather_into_tensor_out", all_gather_into_tensor_out, key)
    _libraries.append(library)


def hide_from_compiler(*kinds: type) -> None:
    """Let torch.compile leave the methods of `kinds`, and what they call, as they are: C++ calls them in the middle of compiled code."""
    from torch._C._dynamo import eval_frame

    skip = eval_frame._FrameAction.SKIP
    for kind in kinds:
        for member in vars(kind).values():
            function = member.fget if isinstance(member, property) else member
            if isinstance(function, FunctionType):
                eval_frame.set_code_exec_strategy(function.__code__, eval_frame._FrameExecStrategy(skip, skip))
                function._torchdynamo_disable = True  # type: ignore[attr-defined]
                function._torchdynamo_disable_msg = "it communicates"  # type: ignore[attr-defined]


def check_map() -> None:
    """Before 2.14: refuse to be one of several backends when that would take a device from another one.

    Raises:
        ValueError: `init_process_group` was called with a map such as "cpu:hostring,cuda:nccl".
    """
    if HAS_PYTHON_BACKENDS:
        return
    frame = sys._getframe(1)
    while frame is not None and frame.f_code.co_name != "_new_process_group_helper":
        frame = frame.f_back  # type: ignore[assignment]
    config = frame.f_locals.get("backend_config") if frame is not None else None
    backends = config.get_device_backend_map() if config is not None else {}
    taken = {device: name for device, name in backends.items() if name != "hostring" and device != "cpu"}
    if taken:
        device, name = next(iter(taken.items()))
        raise ValueError(
            f"torch {torch.__version__} would carry {device} tensors over hostring too, though {device}:{name} was asked for; "
            f"use 'hostring' for all devices, or torch 2.14 or later"
        )
