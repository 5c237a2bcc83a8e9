"""Ranks that have nothing of the model get what they read of it from the head, and say the same as with all of it."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGMLQuantizationType as Kind
from llm_models import byte_tokenizer, packable_model, write_gguf
from ranks import in_threads
from test_gguf_parts import write_parts

import hostring
from hostring.integrations.llm import StagePlan, load_model
from hostring.integrations.llm.demo.job import BUNDLED
from hostring.integrations.llm.packed.library import Unavailable, load
from hostring.integrations.llm.serve.supply import Bare, Offer
from hostring.shipping.hashes import read_record

SECRET = b"of the group"
RANKS = 3


def said(path: Path, **how: Any) -> list[int]:
    def rank(comm: hostring.Comm) -> list[int]:
        return load_model(path, comm, **how).generate("In the beginning", max_tokens=8).tokens

    return list(in_threads(RANKS, rank)[0])


def shipped(path: Path, home: Path, **how: Any) -> tuple[list[list[int]], list[dict[str, int]], list[Path]]:
    """What each rank said, what arrived at the bare ones, and where."""
    head = Offer(str(path), ["127.0.0.1"], SECRET)

    def rank(comm: hostring.Comm) -> tuple[list[int], dict[str, int], Path]:
        told = {**head.told(), "model": f"/not/here/{path.name}"}
        with contextlib.closing(head if comm.rank == 0 else Bare("127.0.0.1", SECRET, home / str(comm.rank))) as mine:
            where = Path(mine.path(str(path), told, comm.rank))
            model = load_model(where, comm, **how)
            tokens = model.generate("In the beginning" if comm.rank == 0 else None, max_tokens=8).tokens
            comm.barrier()
            return tokens, mine.counts(), where

    with contextlib.closing(head):
        found = in_threads(RANKS, rank)
        sent = head.sent()
    counts = [counts for _, counts, _ in found[1:]]
    assert [sent[n].sent for n in (1, 2)] == [one["shipped"] for one in counts]
    return [tokens for tokens, _, _ in found], counts, [where for *_, where in found[1:]]


def check(path: Path, home: Path, nbytes: int, **how: Any) -> list[dict[str, int]]:
    want = said(path, **how)
    tokens, counts, places = shipped(path, home, **how)
    assert tokens == [want] * RANKS
    for one in counts:
        assert one["planned"] == one["read"] == one["shipped"] > 0
        assert one["shipped"] < nbytes
    for place in places:
        only_what_is_recorded(path, place)
    tokens, again, _ = shipped(path, home, **how)
    assert tokens == [want] * RANKS
    assert [(one["shipped"], one["cached"]) for one in again] == [(0, one["planned"]) for one in counts]
    return counts


def only_what_is_recorded(path: Path, place: Path) -> None:
    """Holes where no piece was written, and the head's bytes elsewhere."""
    folder = next(parent for parent in place.parents if parent.name == "model") if place.name != "model" else place
    source = path if path.is_dir() else path.parent
    pieces = read_record(folder.parent / "pieces.jsonl")
    files = sorted({piece.file for piece, _ in pieces})
    names = order(path)
    for number in files:
        got, want = (np.fromfile(root / names[number], np.uint8) for root in (folder, source))
        written = np.zeros(got.size, bool)
        for piece, _ in pieces:
            if piece.file == number:
                for n in range(piece.count):
                    written[piece.offset + n * piece.stride :][: piece.width] = True
        assert (got[written] == want[written]).all()
        assert not got[~written].any()


def order(path: Path) -> list[str]:
    head = Offer(str(path), ["127.0.0.1"], SECRET)
    with contextlib.closing(head):
        return [name for name, *_ in head.told()["files"]]


@pytest.fixture(autouse=True)
def own_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def test_ranks_without_a_hugging_face_folder(tmp_path: Path) -> None:
    check(BUNDLED, tmp_path, sum(file.stat().st_size for file in BUNDLED.iterdir()))


def test_stages_get_their_own_layers(tmp_path: Path) -> None:
    stages = StagePlan((1, 2, 1), (1, 1, 1))
    counts = check(BUNDLED, tmp_path, sum(file.stat().st_size for file in BUNDLED.iterdir()), plan=stages)
    assert counts[0]["shipped"] != counts[1]["shipped"]


def test_ranks_without_a_gguf_file(tmp_path: Path) -> None:
    model = packable_model("qwen2", 3, 64, tied=False)
    path = write_gguf(model, tmp_path / "m.gguf", Kind.Q8_0, byte_tokenizer(model.config.vocab_size))
    check(path, tmp_path, path.stat().st_size, compute="exact")


def test_ranks_that_compute_packed_without_the_parts_of_a_gguf_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    try:
        load()
    except Unavailable as exc:
        pytest.skip(str(exc))
    paths = write_parts(monkeypatch, packable_model("qwen3", 3, 64), tmp_path / "m.gguf", Kind.Q8_0)
    assert len(paths) > 1
    check(paths[0], tmp_path, sum(path.stat().st_size for path in paths), compute="packed")
