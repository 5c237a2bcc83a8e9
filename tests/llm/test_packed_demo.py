"""`hostring demo --compute`: what was computed, held and read; what can't be computed packed is refused."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from demo_jobs import job, measured
from gguf import GGMLQuantizationType as Kind
from llm_models import byte_tokenizer, packable_model, write_gguf

from hostring.integrations.llm.checkpoint.gguf_file import GgufCheckpoint
from hostring.integrations.llm.demo.job import Job
from hostring.integrations.llm.planning import probe


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("packed") / "tiny.gguf"
    return write_gguf(packable_model("qwen3", 2, 64), path, Kind.Q4_0, byte_tokenizer(400))


def packed_job(model: Path, **how: Any) -> Job:
    return job("In the beginning", model=str(model), max_tokens=12, **how)


def demo(*args: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "hostring", "demo", "--max-tokens", "12", "--temperature", "0", *args]
    return subprocess.run(command, capture_output=True, text=True, timeout=110)


def figures(path: Path, *args: str) -> dict[str, Any]:
    done = demo("--json", str(path), *args)
    assert done.returncode == 0, done.stdout + done.stderr
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return found


def test_packed_ranks_say_what_they_hold_and_write_what_one_writes(model: Path, tmp_path: Path) -> None:
    prompt = ("--model", str(model), "--prompt", "In the beginning", "--compute", "packed")
    two = figures(tmp_path / "2.json", *prompt, "--ranks", "2")
    one = measured(packed_job(model, dtypes=("float16",), compute="packed"))
    checkpoint = GgufCheckpoint(model)
    file_nbytes = sum(t.row_nbytes * (t.shape[0] if len(t.shape) > 1 else 1) for t in checkpoint.tensors.values())
    assert (two["compute"], one["compute"]) == ("packed", "packed")
    assert one["bytes_held"] == one["bytes_read"] == [file_nbytes]
    assert len(two["bytes_held"]) == 2
    assert max(two["bytes_held"]) < 0.6 * file_nbytes
    assert two["load_s"] > 0
    assert two["tokens"] == one["tokens"]
    assert two["faults"] == []
    assert [control["tokens"] for control in two["controls"]["one_rank"]] == [one["tokens"]]


def test_a_packed_rank_is_probed_region_by_region(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe, "DECODE_SECONDS", 0.02)
    spec = probe.probe(model, "auto", "float32", torch.device("cpu"), "me", 2)
    assert spec.way.compute == "packed"
    assert spec.decode is not None
    assert min(spec.decode.attention.seconds(1), spec.decode.mlp.seconds(64), spec.decode.head.seconds(100)) > 0


def test_exact_ranks_of_the_same_file_dequantise(model: Path) -> None:
    found = measured(packed_job(model, dtypes=("float16", "bfloat16"), compute="exact"))
    assert found["compute"] == "exact"
    assert [report["dtype"] for report in found["per_rank"]] == ["float16", "bfloat16"]


def test_what_is_not_a_gguf_file_cannot_be_packed() -> None:
    done = demo("--compute", "packed", "--no-controls", "--ranks", "1")
    assert done.returncode != 0
    assert "can't compute packed: only GGUF files hold weights that can be decoded packed" in done.stderr


def test_an_unknown_way_is_refused_before_a_rank_starts() -> None:
    done = demo("--compute", "quick")
    assert done.returncode == 2
    assert "compute 'quick' is not one of auto, packed, exact" in done.stderr
    assert "ready" not in done.stdout
