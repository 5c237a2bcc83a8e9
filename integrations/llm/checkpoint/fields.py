"""Named values of a file, asked for one by one. Every error names the file, the field, its value, and what is
accepted."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

_REQUIRED: Any = object()


@contextmanager
def naming(source: object) -> Iterator[None]:
    """Put the file's name before a ValueError that doesn't hold it."""
    try:
        yield
    except ValueError as exc:
        if str(source) in str(exc):
            raise
        raise ValueError(f"{source}: {exc}") from exc


class Fields:
    """The fields of one file. A field that is null counts as absent.

    Args:
        source: the file, for errors.
        values: its fields.
        prefix: put before every name that is asked for.
    """

    def __init__(self, source: object, values: Mapping[str, Any], prefix: str = "") -> None:
        self.source = source
        self._values, self.prefix = values, prefix
        self._asked: set[str] = set()

    def get(self, name: str, default: Any = None) -> Any:
        """The value as it stands."""
        name = self.prefix + name
        self._asked.add(name)
        value = self._values.get(name)
        return default if value is None else value

    def whole(self, name: str, default: Any = _REQUIRED) -> int:
        """A whole number of at least 1. A list of equal numbers, one per layer, counts as that number."""
        value = self._need(name, default, "a whole number of at least 1")
        if isinstance(value, list) and value:
            if any(other != value[0] for other in value):
                raise self.wrong(name, "the same number for all layers; layers of different shapes are not supported")
            value = value[0]
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise self.wrong(name, "a whole number of at least 1")
        return value

    def real(self, name: str, default: Any = _REQUIRED) -> float:
        """A finite number above 0."""
        value = self._need(name, default, "a number above 0")
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
            raise self.wrong(name, "a number above 0")
        return float(value)

    def flag(self, name: str, default: bool = False) -> bool:
        """True or false."""
        value = self.get(name, default)
        if not isinstance(value, bool):
            raise self.wrong(name, "true or false")
        return value

    def choice(self, name: str, accepted: Collection[str], default: Any = _REQUIRED, what: str = "") -> str:
        """One of the accepted words. `what` is the field in words, for the error; its name when not given."""
        value = self._need(name, default, " or ".join(accepted))
        if not isinstance(value, str) or value not in accepted:
            who = f"{what or self.prefix + name} {value!r} is not supported"
            raise ValueError(f"{self.source}: {who}; this decoder covers {', '.join(accepted)} ({self.prefix}{name})")
        return value

    def only(self, name: str, *accepted: Any) -> None:
        """Raise a ValueError unless the field is absent or has one of these values, which change nothing."""
        value = self.get(name)
        if value is None:
            return
        same = [a for a in accepted if a == value and isinstance(a, bool) == isinstance(value, bool)]
        near = [a for a in accepted if _number(a) and _number(value) and math.isclose(a, value, rel_tol=1e-5)]
        if not same and not near:
            said = " or ".join(_short(a) for a in accepted)
            raise self.wrong(name, f"{said}, or none: this decoder does not compute anything else")

    def asked(self, name: str) -> bool:
        """Whether somebody has asked for the field."""
        return self.prefix + name in self._asked

    def ignore(self, names: Collection[str]) -> None:
        """These fields change nothing, whatever they say."""
        self._asked.update(self.prefix + name for name in names)

    def refuse_unknown(self, *, what: str) -> None:
        """Raise a ValueError that names the fields below the prefix that were not asked for and are not null.

        Args:
            what: the file's kind of fields, in words.
        """
        for name, value in self._values.items():
            if name.startswith(self.prefix) and name not in self._asked and value is not None:
                raise ValueError(
                    f"{self.source}: {name} is {_short(value)}, which this decoder does not know; {what} "
                    f"that may change "
                    "the result are refused. Remove the field if it changes nothing"
                )

    def wrong(self, name: str, accepted: str) -> ValueError:
        """The error for a field with an odd value."""
        value = self._values.get(self.prefix + name)
        return ValueError(f"{self.source}: {self.prefix}{name} is {_short(value)}; expected {accepted}")

    def _need(self, name: str, default: Any, accepted: str) -> Any:
        value = self.get(name, default)
        if value is _REQUIRED:
            state = "is null" if self.prefix + name in self._values else "is missing"
            raise ValueError(f"{self.source}: {self.prefix}{name} {state}; expected {accepted}")
        return value


def _number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 120 else text[:117] + "..."
