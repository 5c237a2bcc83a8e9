"""GGUF models in several files: read as one, whichever file is named; what is missing is named."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from checkpoint_models import TOKENS, alone, close, ours, small
from gguf import GGMLQuantizationType as Kind
from llm_models import byte_tokenizer, packable_model, write_gguf

import hostring
from hostring.integrations.llm.checkpoint.gguf_file import GgufCheckpoint
from hostring.integrations.llm.checkpoint.tokenizer import load_tokenizer
from hostring.integrations.llm.checkpoint.weights import open_checkpoint
from hostring.integrations.llm.packed.library import Unavailable, load
from hostring.integrations.llm.packed.model import build_packed

__all__ = ["alone"]


def write_parts(monkeypatch: pytest.MonkeyPatch, model: Any, path: Path, kind: Kind = Kind.F32) -> list[Path]:
    """The files of a model whose parts have 10 tensors each, as the gguf package writes them."""
    plain = gguf.GGUFWriter
    with monkeypatch.context() as patch:
        patch.setattr(gguf, "GGUFWriter", lambda path, arch: plain(path, arch, split_max_tensors=10))
        write_gguf(model, path, kind, byte_tokenizer(model.config.vocab_size))
    return sorted(path.parent.glob(f"{path.stem}-*.gguf"))


def test_any_part_names_the_model(tmp_path: Path, alone: hostring.Comm, monkeypatch: pytest.MonkeyPatch) -> None:
    model = small("llama", tie_word_embeddings=False)
    paths = write_parts(monkeypatch, model, tmp_path / "m.gguf")
    assert [path.name for path in paths] == [f"m-0000{n}-of-00003.gguf" for n in (1, 2, 3)]
    with torch.inference_mode():
        want = model(TOKENS).logits
    for path in (*paths, tmp_path):
        assert close(ours(path, alone), want)
        assert load_tokenizer(path).vocab_size == load_tokenizer(paths[0]).vocab_size
    parts = {name: info.part for name, info in GgufCheckpoint(paths[1]).tensors.items()}
    assert set(parts.values()) == {0, 1, 2}


def test_packed_ranks_read_all_parts(tmp_path: Path, alone: hostring.Comm, monkeypatch: pytest.MonkeyPatch) -> None:
    try:
        load()
    except Unavailable as exc:
        pytest.skip(str(exc))
    model = packable_model("qwen3", kv_heads=1)
    paths = write_parts(monkeypatch, model, tmp_path / "m.gguf", Kind.Q8_0)
    whole = write_gguf(model, tmp_path / "whole.gguf", Kind.Q8_0)
    built = [build_packed(GgufCheckpoint(path), alone) for path in (paths[2], whole)]
    logits = [part.step(TOKENS, part.new_cache()) for part in built]
    assert torch.equal(*logits)
    assert built[0].forward.nbytes_held == built[1].forward.nbytes_held


def test_a_missing_part_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    paths = write_parts(monkeypatch, small("llama"), tmp_path / "m.gguf")
    for absent in (2, 0):
        paths[absent].rename(tmp_path / "away")
        with pytest.raises(
            FileNotFoundError, match=rf"3 parts of a model, and {paths[absent].name} is not in"
        ) as caught:
            open_checkpoint(paths[1])
        assert paths[1].name in str(caught.value)
        (tmp_path / "away").rename(paths[absent])
    paths[0].rename(tmp_path / "first.gguf")
    with pytest.raises(ValueError, match=r"first\.gguf is part 0 \(from 0\) of 3 .* doesn't end in -NNNNN-of-00003"):
        open_checkpoint(tmp_path / "first.gguf")


def test_parts_that_do_not_belong_together_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    paths = write_parts(monkeypatch, small("llama"), tmp_path / "m.gguf")
    second = paths[1].read_bytes()
    paths[1].write_bytes(paths[2].read_bytes())
    with pytest.raises(ValueError, match=r"m-00002-of-00003\.gguf: split\.no and split\.count are 2 and 3; .* 1 and 3"):
        open_checkpoint(paths[0])
    paths[1].write_bytes(second)
    others = write_parts(monkeypatch, small("llama", num_hidden_layers=3), tmp_path / "n.gguf")
    paths[2].write_bytes(others[2].read_bytes())
    with pytest.raises(ValueError, match=r"has the tensor|split\.tensors\.count is"):
        open_checkpoint(paths[0])
