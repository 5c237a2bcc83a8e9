"""Calls functions where a stand-in for an accelerator is registered with torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from ranks import RankFailed


def beside_a_stand_in(fn: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    import fake_device

    fake_device.install()
    torch.set_num_threads(1)
    try:
        return fn(*args, **kwargs)
    except RankFailed as exc:
        raise AssertionError(str(exc)) from None  # which can be pickled
