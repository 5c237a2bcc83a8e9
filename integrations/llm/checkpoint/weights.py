"""Opens a checkpoint of any kind."""

from __future__ import annotations

from pathlib import Path

from hostring.integrations.llm.checkpoint.checkpoint import Checkpoint
from hostring.integrations.llm.checkpoint.locate import find_gguf
from hostring.integrations.llm.checkpoint.safetensors_file import SafetensorsCheckpoint


def open_checkpoint(path: str | Path) -> Checkpoint:
    """Open a GGUF file, a directory that holds one, a HF directory, or the `.safetensors` file of one.

    Raises:
        FileNotFoundError: nothing there, or no weights in the directory.
        ValueError: a format, an architecture, an option or a tensor that is not supported. No weights were read then.
    """
    if (gguf := find_gguf(path)) is not None:
        from hostring.integrations.llm.checkpoint.gguf_file import GgufCheckpoint

        return GgufCheckpoint(gguf)
    path = Path(path)
    return SafetensorsCheckpoint(path) if path.is_dir() else SafetensorsCheckpoint(path.parent, path)
