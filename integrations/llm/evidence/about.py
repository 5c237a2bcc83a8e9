"""What a pack says of the model, the machine and the software, and of the energy that the run took."""

from __future__ import annotations

import hashlib
import json
import os
import platform
import sys
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from time import perf_counter
from typing import Any

from hostring.integrations.llm.checkpoint.weights import open_checkpoint
from hostring.integrations.llm.evidence.cells import Cell, absent, measured

_PACKAGES = ("hostring", "numpy", "torch", "gguf", "xllamacpp", "safetensors", "tokenizers")
_BLOCK = 1 << 22
_RAPL = Path("/sys/class/powercap")


def of_model(path: Path) -> dict[str, Any]:
    """Hashes of the weights, and what the header says."""
    config = json.loads(json.dumps(asdict(open_checkpoint(path).config), default=str))
    text = json.dumps(config, sort_keys=True)
    return {
        "file": path.name,
        "sha256": _sha256(path),
        "config_sha256": hashlib.sha256(text.encode()).hexdigest(),
        "config": config,
    }


def _sha256(path: Path) -> str:
    """Of a file, or of the weights and the JSON files of a folder, by name."""
    found = hashlib.sha256()
    files = [path] if path.is_file() else sorted(f for f in path.iterdir() if f.suffix in (".safetensors", ".json"))
    for file in files:
        with file.open("rb") as opened:
            while block := opened.read(_BLOCK):
                found.update(block)
    return found.hexdigest()


def of_host() -> dict[str, Any]:
    """The machine, without its name, and how many processes wanted its cores when this was asked."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    load = round(os.getloadavg()[0], 1) if hasattr(os, "getloadavg") else None
    found = {"machine": platform.machine(), "system": platform.system(), "processor": _processor()}
    return found | {"cores": cores, "load_at_start": load}


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")


def versions() -> dict[str, str]:
    """Of Python and of what computes."""
    found = {"python": platform.python_version(), "implementation": sys.implementation.name}
    for package in _PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "not installed"
    return found


class Energy:
    """Joules of this machine's packages, where the platform counts them (RAPL)."""

    def __init__(self) -> None:
        self._begun, self._before = perf_counter(), _joules()

    def watts(self) -> Cell:
        """The mean power since this was made."""
        after, seconds = _joules(), perf_counter() - self._begun
        if self._before is None or after is None or after < self._before:
            return absent("the platform gives no energy counters")
        return measured([(after - self._before) / seconds], "W")


def _joules() -> float | None:
    try:
        found = [int((zone / "energy_uj").read_text(encoding="ascii")) for zone in _RAPL.glob("intel-rapl:?")]
    except (OSError, ValueError):
        return None
    return 1e-6 * sum(found) if found else None
