"""The stores that `hostring.init(store=…)` takes."""

from hostring.store.client import StoreRefusedError, TcpStore
from hostring.store.stores import MemoryStore, Store, TorchStore

__all__ = ["MemoryStore", "Store", "StoreRefusedError", "TcpStore", "TorchStore"]
