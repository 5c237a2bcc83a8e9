"""Registers the torch backend as soon as there is a torch, without importing it."""

from __future__ import annotations

import importlib
import sys
from importlib.machinery import ModuleSpec, PathFinder
from typing import Any

_C10D = "torch.distributed.distributed_c10d"


def arrange() -> None:
    """Register now, or when torch is imported. For an installed package, torch's entry points do this."""
    if _C10D in sys.modules:
        _register()
    elif not any(isinstance(finder, _Watch) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Watch())


def _register() -> None:
    importlib.import_module("hostring.integrations.torch_backend").register()


class _Watch:
    """A finder that finds nothing. It notices the import of torch's distributed package."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if name != _C10D:
            return None
        sys.meta_path.remove(self)
        spec = PathFinder.find_spec(name, path)
        if spec is None or spec.loader is None:
            return spec
        execute = spec.loader.exec_module

        def then_register(module: Any) -> None:
            execute(module)
            _register()

        spec.loader.exec_module = then_register  # type: ignore[method-assign]
        return spec
