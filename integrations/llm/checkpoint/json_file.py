"""JSON files of a checkpoint, and errors that name them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def read_json(path: Path) -> dict[str, Any]:
    """The object in a file.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: it doesn't hold a JSON object.
    """
    if not path.exists():
        raise FileNotFoundError(f"no {path.name} in {path.parent}")
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as exc:
        raise ValueError(f"{path} can't be read as JSON: {exc}") from exc
    if not isinstance(found, dict):
        raise ValueError(f"{path} should hold a JSON object")
    return found


def read_optional_json(path: Path) -> dict[str, Any]:
    """The object in a file; an empty one where there is no file."""
    return read_json(path) if path.exists() else {}
