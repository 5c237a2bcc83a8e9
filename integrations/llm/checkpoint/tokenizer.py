"""Reads the tokenizer of a checkpoint of any kind."""

from __future__ import annotations

from pathlib import Path

from hostring.integrations.llm.checkpoint.chat_tokenizer import ChatTokenizer
from hostring.integrations.llm.checkpoint.hf_tokenizer import read_hf_tokenizer
from hostring.integrations.llm.checkpoint.locate import find_gguf


def load_tokenizer(path: str | Path) -> ChatTokenizer:
    """The tokenizer of a GGUF file, of a directory that holds one, or of a HF directory.

    Raises:
        FileNotFoundError: the directory has no tokenizer.json.
        ValueError: a kind of tokenizer that is not supported.
    """
    if (gguf := find_gguf(path)) is not None:
        from hostring.integrations.llm.checkpoint.gguf_tokenizer import read_gguf_tokenizer

        return read_gguf_tokenizer(gguf)
    path = Path(path)
    return read_hf_tokenizer(path if path.is_dir() else path.parent)
