"""WordPiece of GGUF files (`tokenizer.ggml.model` "bert"), rebuilt for the `tokenizers` library.

GGUF marks the start of a word (with U+2581), and BERT's own vocabulary marks what continues one (with ##).
"""

from __future__ import annotations

from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers

from hostring.integrations.llm.checkpoint.gguf_vocabulary import NORMAL, Vocabulary

_START, _CONTINUES = "\u2581", "##"
MAX_WORD_CHARACTERS = 100  # as in BERT; a longer word is unknown


def wordpiece(vocabulary: Vocabulary) -> Tokenizer:
    """The tokenizer. Texts are lowercased, and lose their accents, unless the file says otherwise, or has tokens with
    capitals."""
    fields = vocabulary.fields
    ids = {_written(token): i for i, token in enumerate(vocabulary.tokens)}
    unknown = vocabulary.text("unknown") or "[UNK]"
    tokenizer = Tokenizer(models.WordPiece(ids, unk_token=unknown, max_input_chars_per_word=MAX_WORD_CHARACTERS))
    cased = any(token != token.lower() and not _is_bracketed(token) for token in vocabulary.of_kind(NORMAL))
    lowercase = fields.flag("normalizer.lowercase", not cased)
    strip_accents = fields.flag("normalizer.strip_accents", lowercase)
    tokenizer.normalizer = normalizers.BertNormalizer(True, True, strip_accents, lowercase)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece(_CONTINUES)
    vocabulary.add_to(tokenizer)
    first = "bos" if fields.flag("add_bos_token", True) else None
    last = "seperator" if fields.flag("add_sep_token", True) else None  # spelt so in GGUF
    vocabulary.surround(tokenizer, first, last)
    return tokenizer


def _written(token: str) -> str:
    """As BERT writes it."""
    if token.startswith(_START):
        return token[len(_START) :]
    return token if _is_bracketed(token) else _CONTINUES + token


def _is_bracketed(token: str) -> bool:
    return token.startswith("[") and token.endswith("]")
