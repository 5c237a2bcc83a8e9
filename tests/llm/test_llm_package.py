"""What the package promises to importers."""

from __future__ import annotations

import subprocess
import sys

import pytest

import hostring.integrations.llm as llm


def test_every_public_name_is_there() -> None:
    assert all(getattr(llm, name).__name__ == name for name in llm.__all__)
    with pytest.raises(AttributeError, match="no attribute 'load_modell'"):
        _ = llm.load_modell


def test_headers_and_plans_need_no_torch() -> None:
    code = (
        "import sys, hostring.integrations.llm.model.shards, hostring.integrations.llm.checkpoint.gguf_header\n"
        "assert 'torch' not in sys.modules, 'torch was imported'"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert result.returncode == 0, result.stderr
