"""Reads the fields of a request, and refuses what is not as OpenAI's API says."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from typing import Any

from hostring.integrations.llm.serve.http.errors import ApiError, invalid

_MAX_INT = 2**63


class BodyFields:
    """The fields of one JSON object. What is null counts as not given.

    Args:
        within: the name of the object, for errors; "" for the body itself.
    """

    def __init__(self, values: Mapping[str, Any], within: str = "") -> None:
        self._values = {key: value for key, value in values.items() if value is not None}
        self._within = f"{within}." if within else ""

    def __contains__(self, name: str) -> bool:
        return name in self._values

    def get(self, name: str) -> Any:
        return self._values.get(name)

    def wrong(self, name: str, wanted: str) -> ApiError:
        found, full = self._values.get(name), f"{self._within}{name}"
        shown = repr(found) if isinstance(found, bool | int | float) or found in ("", [], {}) else f"a {_kind(found)}"
        return invalid(full, f"{full!r} is {shown}; expected {wanted}", "invalid_type")

    def number(self, name: str, default: float, low: float, high: float) -> float:
        found = self._values.get(name, default)
        if isinstance(found, bool) or not isinstance(found, int | float):
            raise self.wrong(name, f"a number from {low:g} to {high:g}")
        if not math.isfinite(found) or not low <= found <= high:
            raise invalid(f"{self._within}{name}", f"{self._within}{name} is {found}; expected {low:g} to {high:g}")
        return float(found)

    def whole(self, name: str, low: int, high: int = _MAX_INT) -> int | None:
        """A whole number, or None when it is not given."""
        found = self._values.get(name)
        if found is None:
            return None
        limits = f"a whole number of at least {low}" if high == _MAX_INT else f"a whole number from {low} to {high}"
        if isinstance(found, float) and found.is_integer():
            found = int(found)
        if isinstance(found, bool) or not isinstance(found, int):
            raise self.wrong(name, limits)
        if not low <= found <= high:
            raise invalid(f"{self._within}{name}", f"{self._within}{name} is {found}; expected {limits}")
        return found

    def flag(self, name: str) -> bool:
        found = self._values.get(name, False)
        if not isinstance(found, bool):
            raise self.wrong(name, "true or false")
        return found

    def text(self, name: str) -> str | None:
        found = self._values.get(name)
        if found is not None and not isinstance(found, str):
            raise self.wrong(name, "a string")
        return found

    def object(self, name: str) -> Mapping[str, Any] | None:
        found = self._values.get(name)
        if found is not None and not isinstance(found, dict):
            raise self.wrong(name, "an object")
        return found

    def only(self, known: Collection[str], unsupported: Mapping[str, str]) -> None:
        """Refuse fields that don't exist, and those whose effect this server can't give.

        Args:
            known: names of fields that are read, or may be ignored.
            unsupported: what to say of fields that exist in OpenAI's API.
        """
        for name in self._values:
            if name in unsupported:
                raise invalid(name, f"{name!r} is not supported: {unsupported[name]}", "unsupported_parameter")
            if name not in known:
                full = f"{self._within}{name}"
                raise invalid(full, f"Unknown parameter: {full!r}.", "unknown_parameter")


def _kind(value: object) -> str:
    """The name that JSON has for it."""
    names = {str: "string", list: "list", dict: "object", type(None): "null"}
    return names.get(type(value), type(value).__name__)
