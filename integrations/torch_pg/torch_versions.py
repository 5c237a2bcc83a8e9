"""The one place where torch's versions differ.

Up to 2.13, a Python group must be the whole process group, and C++ can't reach all its methods. From 2.14 on, a Python
object can also be the backend of one device in torch's own process group; ours registers one that forwards to it.
"""

from __future__ import annotations

import sys
from datetime import timedelta
from types import FrameType, FunctionType
from typing import Any

import torch
from torch._C import _distributed_c10d as c10d

HAS_PYTHON_BACKENDS = hasattr(c10d, "Window")  # 2.14 and later

_libraries: list[Any] = []  # kept: a library's registrations end with it


def reach_from_cpp() -> None:
    """Before 2.14: let `_c10d_functional.all_gather_into_tensor_out`, which compiled FSDP calls, find Python groups."""
    if HAS_PYTHON_BACKENDS or _libraries:
        return

    def all_gather_into_tensor_out(
        input: torch.Tensor, group_size: int, group_name: str, *, out: torch.Tensor
    ) -> torch.Tensor:
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
    """Keep torch.compile away from the methods of `kinds` and from what they call: C++ calls them in compiled code."""
    from torch._C._dynamo import eval_frame

    skip = eval_frame._FrameAction.SKIP
    for kind in kinds:
        for member in vars(kind).values():
            function = member.fget if isinstance(member, property) else member
            if isinstance(function, FunctionType):
                eval_frame.set_code_exec_strategy(function.__code__, eval_frame._FrameExecStrategy(skip, skip))
                function._torchdynamo_disable = True  # type: ignore[attr-defined]
                function._torchdynamo_disable_msg = "it communicates"  # type: ignore[attr-defined]


def present(group: Any, timeout: timedelta) -> Any:
    """What the creator gives to torch for `group`: usually `group` itself, from 2.14 on with a backend for its devices.

    When other backends serve other devices of the same torch group, torch takes only a backend, from 2.14 on.
    """
    others = _other_backends()
    if not HAS_PYTHON_BACKENDS:
        return group
    from hostring.integrations.torch_pg.device_backend import DeviceBackend

    if others:
        return DeviceBackend(group, timeout, owner=True)
    group.device_backend = DeviceBackend(group, timeout, owner=False)
    custom = c10d.ProcessGroup.BackendType.CUSTOM
    group._set_default_backend(custom)
    for device in group._device_types:
        group._register_backend(device, custom, group.device_backend)
    return group


def check_map() -> None:
    """Before 2.14: refuse to be one of several backends, which would take devices from the others.

    Raises:
        ValueError: `init_process_group` was called with a map such as "cpu:hostring,cuda:nccl".
    """
    others = {} if HAS_PYTHON_BACKENDS else _other_backends()
    for device, name in others.items():
        raise ValueError(
            f"torch {torch.__version__} would carry {device} tensors over hostring too, though {device}:{name} was "
            f"asked for; use 'hostring' for all devices, or torch 2.14 or later"
        )


def _other_backends() -> dict[str, str]:
    """The other backends of the torch group under way, by device. Before 2.14 hostring may replace the CPU's."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_name != "_new_process_group_helper":
        frame = frame.f_back
    config = frame.f_locals.get("backend_config") if frame is not None else None
    backends = config.get_device_backend_map() if config is not None else {}
    return {
        device: str(name)
        for device, name in backends.items()
        if name != "hostring" and (device != "cpu" or HAS_PYTHON_BACKENDS)
    }
