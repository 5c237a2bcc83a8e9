"""SentencePiece of GGUF files, rebuilt for the `tokenizers` library: BPE by score (`tokenizer.ggml.model` "llama") and
unigram ("t5").

Texts are prepared as llama.cpp prepares them: each stretch between special tokens begins with a space, unless
`add_space_prefix` is false.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tokenizers import Regex, Tokenizer, decoders, models, normalizers

from hostring.integrations.llm.checkpoint.gguf_vocabulary import BYTE, CONTROL, UNKNOWN, Vocabulary

_SPACE = "\u2581"  # stands for a space inside of tokens


def scored_bpe(vocabulary: Vocabulary) -> Tokenizer:
    """BPE without a list of merges: of all neighbours that make a token, those of the best score are merged first.

    Raises:
        ValueError: no scores.
    """
    ids = {token: i for i, token in enumerate(vocabulary.tokens)}
    made = {
        token: score
        for token, kind, score in zip(vocabulary.tokens, vocabulary.kinds, vocabulary.scores(), strict=False)
        if kind not in (UNKNOWN, CONTROL, BYTE)
    }
    spells_bytes = BYTE in vocabulary.kinds
    model = models.BPE(
        ids, _merges(made), unk_token=vocabulary.text("unknown"), fuse_unk=True, byte_fallback=spells_bytes
    )
    return _around(vocabulary, Tokenizer(model), [], begins=True, ends=False)


def unigram(vocabulary: Vocabulary) -> Tokenizer:
    """The tokens of the highest total score.

    Raises:
        ValueError: no scores.
    """
    fields = vocabulary.fields
    pieces = list(zip(vocabulary.tokens, vocabulary.scores(), strict=False))
    model = models.Unigram(pieces, vocabulary.id("unknown"), BYTE in vocabulary.kinds)
    prepared: list[normalizers.Normalizer] = []
    charsmap = fields.get("precompiled_charsmap")
    if charsmap:
        prepared.append(normalizers.Precompiled(bytes(number & 255 for number in charsmap)))
    if fields.flag("remove_extra_whitespaces"):
        prepared += [normalizers.Strip(), normalizers.Replace(Regex(" {2,}"), " ")]
    return _around(vocabulary, Tokenizer(model), prepared, begins=False, ends=True)


def _around(
    vocabulary: Vocabulary,
    tokenizer: Tokenizer,
    prepared: list[normalizers.Normalizer],
    *,
    begins: bool,
    ends: bool,
) -> Tokenizer:
    """What both kinds have in common: spaces, the way back to text, and special tokens.

    Args:
        prepared: normalizers that come first.
        begins: whether a text begins with the BOS token, where the file doesn't say.
        ends: the same for the EOS token.
    """
    fields = vocabulary.fields
    spaced = fields.flag("add_space_prefix", True)
    prefix = [normalizers.Prepend(_SPACE)] if spaced else []
    tokenizer.normalizer = normalizers.Sequence([*prepared, *prefix, normalizers.Replace(" ", _SPACE)])
    strip = [decoders.Strip(" ", 1, 0)] if spaced else []
    steps = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
    tokenizer.decoder = decoders.Sequence(steps)
    vocabulary.add_to(tokenizer)
    first = "bos" if fields.flag("add_bos_token", begins) else None
    vocabulary.surround(tokenizer, first, "eos" if fields.flag("add_eos_token", ends) else None)
    return tokenizer


def _merges(scores: Mapping[str, float]) -> Sequence[tuple[str, str]]:
    """All ways to make a token of two others, the best token first."""
    found = [
        (score, token[:at], token[at:])
        for token, score in scores.items()
        for at in range(1, len(token))
        if token[:at] in scores and token[at:] in scores
    ]
    found.sort(key=lambda one: (-one[0], -len(one[1]), -len(one[2])))  # ties as in transformers: the longest left side
    return [(left, right) for _, left, right in found]
