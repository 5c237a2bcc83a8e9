"""The files of a model: their hashes, and the names that they may have."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

import pytest

from hostring.shipping.extents import Extent
from hostring.shipping.folder import ShippedFile
from hostring.shipping.hashes import Hashes


def test_a_hash_is_computed_once(tmp_path: Path) -> None:
    original, piece = tmp_path / "m.bin", Extent(0, 10, 20)
    original.write_bytes(bytes(range(100)))
    digest, content = Hashes([original], tmp_path).read(piece)
    assert digest == hashlib.sha256(content).digest() == hashlib.sha256(bytes(range(10, 30))).digest()
    assert Hashes([original], tmp_path).known(piece) == digest
    os.utime(original, ns=(5, 5))
    assert Hashes([original], tmp_path).known(piece) is None


@pytest.mark.parametrize("name", ["../m", "/m", "a/../../m", "", "a\\..\\m"])
def test_names_lead_nowhere_else(name: str) -> None:
    with pytest.raises(ValueError, match="is no name of a file"):
        ShippedFile(name, 1, 1)
