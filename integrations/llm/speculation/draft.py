"""Guesses from a smaller model of the same vocabulary, which runs on the head rank alone."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from hostring import init
from hostring.integrations.llm.checkpoint.chat_tokenizer import ChatTokenizer
from hostring.integrations.llm.checkpoint.tokenizer import load_tokenizer
from hostring.integrations.llm.checkpoint.weights import open_checkpoint
from hostring.integrations.llm.compute import build_local
from hostring.integrations.llm.model.devices import find_device
from hostring.integrations.llm.model.local_model import LocalModel
from hostring.integrations.llm.prefix import PrefixCache

MAX_CACHES = 8  # of texts that go on in turn
_CHUNK = 512  # positions in one forward pass over a prompt


class DraftModel:
    """A small model that continues a text greedily, as far as it is asked.

    Args:
        model: all of it, on this rank.
        n_ids: of the vocabulary that both models know.
    """

    def __init__(self, model: LocalModel, n_ids: int) -> None:
        self._model, self._n_ids = model, n_ids
        self._known: list[PrefixCache] = []  # the one used last comes last

    def guesses(self, ids: Sequence[int], count: int) -> list[int]:
        """So many ids after `ids`; fewer, or none, where its KV cache ends. None of them: only read `ids`."""
        count, found = min(count, self._model.max_seq - len(ids) + 1), list[int]()
        if len(ids) > self._model.max_seq:
            return []
        known = self._known_of(ids)
        cache, rest = known.cache, known.reuse(self._model.comm, ids)
        for at in range(0, len(rest), _CHUNK):
            logits = self._model.step(torch.tensor([rest[at : at + _CHUNK]]), cache)
        while len(found) < count:
            if found:
                logits = self._model.step(torch.tensor([found[-1:]]), cache)
            found.append(int(logits[0, : self._n_ids].argmax()))
        known.ids = [*ids, *found[:-1]]
        return found

    def _known_of(self, ids: Sequence[int]) -> PrefixCache:
        """The cache of a text that begins like this one, else another one."""
        best = max(self._known, key=lambda known: common_start(known.ids, ids), default=None)
        if best is None or common_start(best.ids, ids) < len(best.ids) // 2:
            full = len(self._known) >= MAX_CACHES
            best = self._known[0] if full else PrefixCache(self._model.new_cache())
        self._known = [*(known for known in self._known if known is not best), best]
        return best


def common_start(a: Sequence[int], b: Sequence[int]) -> int:
    """How many ids are the same from the start."""
    return next((n for n, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def load_draft(path: str | Path, tokenizer: ChatTokenizer, max_seq: int, device: str = "cpu") -> DraftModel:
    """Load the model at `path` whole.

    Args:
        tokenizer: of the model that checks the guesses. max_seq: positions of its KV cache.

    Raises:
        ValueError: the two vocabularies differ, or the model can't be loaded.
    """
    if not Path(path).exists():
        raise ValueError(f"--draft {path}: there is no such file or folder")
    check_vocabulary(path, load_tokenizer(path), tokenizer)
    checkpoint = open_checkpoint(path)
    where = find_device(device)
    alone = init(0, 1, rejoin=False)
    part, _ = build_local(
        checkpoint, alone, "auto", where, plan=None, max_seq=max_seq, hash_activations=False, compile=False
    )
    return DraftModel(part, min(tokenizer.vocab_size, checkpoint.config.vocab_size))


def check_vocabulary(path: str | Path, draft: ChatTokenizer, target: ChatTokenizer) -> None:
    """Raise a ValueError unless both tokenizers have the same tokens under the same ids."""
    ours, theirs = (t.tokenizer.get_vocab(with_added_tokens=True) for t in (target, draft))
    if ours == theirs:
        return
    token = next(token for token in [*ours, *theirs] if ours.get(token) != theirs.get(token))
    raise ValueError(
        f"--draft {path} has another vocabulary than the model: {len(theirs)} tokens, not {len(ours)}, and {token!r} "
        f"is {theirs.get(token, 'none')} there and {ours.get(token, 'none')} here; take one of the same family"
    )
