"""Training over slow links, and after a rank was lost: outer steps (LocalSGD, DiLoCo) and state that is handed on."""

from __future__ import annotations

from hostring.training.local_sgd import LocalSGD
from hostring.training.packing import digest, pack, unpack
from hostring.training.sharing import share_state

__all__ = ["LocalSGD", "digest", "pack", "share_state", "unpack"]
