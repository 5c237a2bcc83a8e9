"""Stores: small shared dictionaries through which ranks find each other before they have links."""

from __future__ import annotations

import contextlib
import datetime
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any, Protocol, runtime_checkable

from hostring.errors import RendezvousError
from hostring.transports.addresses import route_to

MIN_POLL_S, MAX_POLL_S = 0.0002, 0.05  # between two looks into torch's store


@runtime_checkable
class Store(Protocol):
    """What `exchange` needs of a store. Any thread may call any method."""

    def set(self, key: str, value: bytes) -> None:
        """Store `value`, replacing what was there."""

    def get(self, key: str, timeout: float) -> bytes:
        """Wait until `key` is there.

        Raises:
            TimeoutError: it is not there after `timeout` seconds.
            ConnectionError: the store is gone, or is another one now and has forgotten everything.
        """

    def get_all(self, keys: Sequence[str], timeout: float) -> list[bytes]:
        """The same for several keys, in as few round trips as the store allows."""

    def check(self, keys: Sequence[str]) -> bool:
        """Whether all `keys` are there, without waiting."""

    def add(self, key: str, amount: int) -> int:
        """Add to the counter `key`, which starts at 0, and return its new value."""

    def delete(self, key: str) -> None:
        """Forget `key`. Nothing happens when it is not there."""

    def close(self) -> None:
        """Give up the connection. Idempotent."""


class MemoryStore:
    """A store for ranks that are threads of one process."""

    def __init__(self) -> None:
        self._values: dict[str, bytes] = {}
        self._counters: dict[str, int] = {}
        self._changed = threading.Condition()

    def set(self, key: str, value: bytes) -> None:
        """See `Store.set`."""
        with self._changed:
            self._values[key] = bytes(value)
            self._changed.notify_all()

    def get(self, key: str, timeout: float) -> bytes:
        """See `Store.get`."""
        with self._changed:
            if not self._changed.wait_for(lambda: key in self._values, timeout):
                raise TimeoutError(f"{key!r} is not in the store after {timeout:.1f} s")
            return self._values[key]

    def get_all(self, keys: Sequence[str], timeout: float) -> list[bytes]:
        """See `Store.get_all`."""
        until = time.monotonic() + timeout
        return [self.get(key, until - time.monotonic()) for key in keys]

    def check(self, keys: Sequence[str]) -> bool:
        """See `Store.check`."""
        with self._changed:
            return all(key in self._values for key in keys)

    def add(self, key: str, amount: int) -> int:
        """See `Store.add`."""
        with self._changed:
            value = self._counters[key] = self._counters.get(key, 0) + amount
            return value

    def delete(self, key: str) -> None:
        """See `Store.delete`."""
        with self._changed:
            self._values.pop(key, None)
            self._counters.pop(key, None)

    def close(self) -> None:
        """See `Store.close`. Nothing to give up."""


class TorchStore:
    """Any `torch.distributed.Store` as a store of ours. Torch's own keys are left alone by a prefix.

    Attributes:
        local_host: the address of this host that leads to the store; None when the store has no place in a network.
    """

    def __init__(self, store: Any) -> None:
        self._store = store
        innermost = store
        while hasattr(innermost, "underlying_store"):
            innermost = innermost.underlying_store
        host = getattr(innermost, "host", None)
        self.local_host = route_to(host) if isinstance(host, str) else None

    @classmethod
    def agent(cls, host: str, port: int, world_size: int, timeout: float) -> TorchStore:
        """A client of the store that torchrun's agent runs.

        Raises:
            RendezvousError: nobody answers there.
        """
        from torch.distributed import TCPStore  # type: ignore[attr-defined,unused-ignore]

        try:
            return cls(
                TCPStore(host, port, world_size, False, datetime.timedelta(seconds=timeout), wait_for_workers=False)
            )
        except RuntimeError as exc:
            raise RendezvousError(f"torchrun's store at {host} port {port} does not answer: {exc}") from exc

    def set(self, key: str, value: bytes) -> None:
        """See `Store.set`."""
        with _torch_errors():
            self._store.set(f"hostring/{key}", bytes(value))

    def get(self, key: str, timeout: float) -> bytes:
        """See `Store.get`."""
        return self.get_all([key], timeout)[0]

    def get_all(self, keys: Sequence[str], timeout: float) -> list[bytes]:
        """See `Store.get_all`."""
        until, pause = time.monotonic() + timeout, MIN_POLL_S
        while not self.check(keys):  # torch's own wait writes a warning to stderr whenever it times out
            left = until - time.monotonic()
            if left <= 0:
                raise TimeoutError(f"{' or '.join(map(repr, keys))} is not in torch's store after {timeout:.1f} s")
            time.sleep(min(pause, left))
            pause = min(MAX_POLL_S, pause * 2)
        names = [f"hostring/{key}" for key in keys]
        with _torch_errors():
            if len(names) > 1 and self._store.has_extended_api():  # a FileStore has none
                return [bytes(value) for value in self._store.multi_get(names)]
            return [bytes(self._store.get(name)) for name in names]

    def check(self, keys: Sequence[str]) -> bool:
        """See `Store.check`."""
        with _torch_errors():
            return bool(self._store.check([f"hostring/{key}" for key in keys]))

    def add(self, key: str, amount: int) -> int:
        """See `Store.add`."""
        with _torch_errors():
            return int(self._store.add(f"hostring/{key}", amount))

    def delete(self, key: str) -> None:
        """See `Store.delete`."""
        with _torch_errors():
            self._store.delete_key(f"hostring/{key}")

    def close(self) -> None:
        """See `Store.close`. The store belongs to torch."""


@contextlib.contextmanager
def _torch_errors() -> Iterator[None]:
    try:
        yield
    except RuntimeError as exc:  # torch's kind for everything; the store's client does not connect again
        raise RendezvousError(f"torch's store failed: {exc}") from exc
