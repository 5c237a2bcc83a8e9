"""The stores that `hostring.init(store=…)` takes.

Whoever takes a store starts ranks soon, often as threads. What `init` needs is loaded here, once, so that those threads
don't wait for each other's imports while their start-up deadline runs.
"""

import hostring.comm
import hostring.launch.orphans  # noqa: F401
from hostring.store.client import StoreRefusedError, TcpStore
from hostring.store.stores import MemoryStore, Store, TorchStore

__all__ = ["MemoryStore", "Store", "StoreRefusedError", "TcpStore", "TorchStore"]
