"""The tokenizer and the chat templates inside a GGUF file."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from hostring.integrations.llm.checkpoint.chat_template import DEFAULT
from hostring.integrations.llm.checkpoint.chat_tokenizer import ChatTokenizer
from hostring.integrations.llm.checkpoint.fields import Fields
from hostring.integrations.llm.checkpoint.gguf_byte_bpe import byte_bpe
from hostring.integrations.llm.checkpoint.gguf_parts import read_fields
from hostring.integrations.llm.checkpoint.gguf_sentencepiece import scored_bpe, unigram
from hostring.integrations.llm.checkpoint.gguf_vocabulary import CONTROL, Vocabulary
from hostring.integrations.llm.checkpoint.gguf_wordpiece import wordpiece

_KINDS: dict[str, tuple[str, Callable[[Vocabulary], Tokenizer]]] = {
    "gpt2": ("byte-level BPE", byte_bpe),
    "llama": ("SentencePiece BPE", scored_bpe),
    "t5": ("SentencePiece unigram", unigram),
    "bert": ("WordPiece", wordpiece),
}
_NAMED = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding", "sep": "seperator", "mask": "mask"}
_USUAL_IDS: dict[str, dict[str, int]] = {  # as in llama.cpp, where the file names none
    "llama": {"bos": 1, "eos": 2, "unknown": 0},
    "t5": {"eos": 1, "unknown": 2, "padding": 0},
    "bert": {"bos": 101, "unknown": 100, "seperator": 102, "padding": 0, "mask": 103},
}
_ENDS = ("eot", "eom")
# Files often name one end of a document or of a turn, and the model uses another. llama.cpp stops at these, too.
_END_TEXTS = {
    "</s>", "<|eot_id|>", "<|eom_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>", "<|endoftext|>", "<|end_of_text|>",
    "<end_of_utterance>", "<EOT>", "<\uff5cend\u2581of\u2581sentence\uff5c>",
}  # fmt: skip
_TEMPLATE = "tokenizer.chat_template"


def read_gguf_tokenizer(path: Path) -> ChatTokenizer:
    """Read the tokenizer and chat template of the GGUF file at `path`."""
    return tokenizer_from_fields(read_fields(path), path)


def tokenizer_from_fields(values: Mapping[str, Any], source: object = "GGUF metadata") -> ChatTokenizer:
    """Build the tokenizer that GGUF metadata describes.

    Args:
        values: the metadata.
        source: the file, for errors.

    Raises:
        ValueError: a kind of tokenizer, or of cutting text, that is not known here; or a list that is missing.
    """
    fields = Fields(source, values, "tokenizer.ggml.")
    kind = fields.get("model")
    if kind not in _KINDS:
        known = ", ".join(f"{name!r} ({what})" for name, (what, _) in _KINDS.items())
        raise ValueError(f"{source}: tokenizer.ggml.model {kind!r} is not supported; supported are {known}")
    vocabulary = Vocabulary.of(fields, _USUAL_IDS.get(kind, {}))
    ids = {name: vocabulary.id(theirs) for name, theirs in _NAMED.items()}
    return ChatTokenizer(
        _KINDS[kind][1](vocabulary),
        _ends(vocabulary),
        _templates(values),
        {f"{name}_token": vocabulary.tokens[i] for name, i in ids.items() if i is not None},
    )


def _ends(vocabulary: Vocabulary) -> frozenset[int]:
    """The ids that end an answer."""
    named = [vocabulary.id(name) for name in ("eos", *_ENDS)]
    control = set(vocabulary.of_kind(CONTROL)) & _END_TEXTS
    return frozenset([i for i in named if i is not None] + [vocabulary.tokens.index(token) for token in control])


def _templates(values: Mapping[str, Any]) -> dict[str, str]:
    """The one without a name is the default; others are `tokenizer.chat_template.NAME`."""
    found = {key.removeprefix(f"{_TEMPLATE}."): str(v) for key, v in values.items() if key.startswith(f"{_TEMPLATE}.")}
    single = values.get(_TEMPLATE)
    return found if single is None else {**found, DEFAULT: str(single)}
