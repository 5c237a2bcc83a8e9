"""The tokenizer inside a GGUF file: byte-level BPE, rebuilt for the `tokenizers` library."""

from __future__ import annotations

import mmap
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers

from hostring.integrations.llm.checkpoint.gguf_header import read_header
from hostring.integrations.llm.checkpoint.tokenizer import ChatTokenizer

_CONTROL, _USER_DEFINED = 3, 4
_ENDS = ("eos_token_id", "eot_token_id", "eom_token_id")

# How text is cut before merging, as in llama.cpp's src/llama-vocab.cpp, by the name in tokenizer.ggml.pre.
_QWEN2 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_LLAMA3 = _QWEN2.replace(r"|\p{N}| ?", r"|\p{N}{1,3}| ?")
_SPLITS = {"qwen2": _QWEN2, "llama-bpe": _LLAMA3, "llama3": _LLAMA3, "llama-v3": _LLAMA3}
_GPT2 = ("gpt-2", "gpt2", "default")
_SINGLE_DIGITS = ("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone")


def read_gguf_tokenizer(path: Path) -> ChatTokenizer:
    """Read the tokenizer and chat template of the GGUF file at `path`."""
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        fields, _ = read_header(path, data)
    return tokenizer_from_fields(fields)


def tokenizer_from_fields(fields: Mapping[str, Any]) -> ChatTokenizer:
    """Build the tokenizer that GGUF metadata describes.

    Raises:
        ValueError: not byte-level BPE, or cut by rules that are not known here.
    """

    def field(name: str, default: Any = None) -> Any:
        return fields.get(f"tokenizer.ggml.{name}", default)

    if field("model") != "gpt2":
        raise ValueError(f"tokenizer.ggml.model {field('model')!r} is not supported; byte-level BPE ('gpt2') is")
    tokens: list[str] = field("tokens")
    merges = [tuple(pair.split(" ", 1)) for pair in field("merges")]
    tokenizer = Tokenizer(
        models.BPE({t: i for i, t in enumerate(tokens)}, merges, ignore_merges=field("pre") in ("llama-bpe", "llama3"))
    )
    tokenizer.pre_tokenizer = _pre_tokenizer(str(field("pre", "default")))
    tokenizer.decoder = decoders.ByteLevel()
    kinds = list(zip(tokens, field("token_type", []), strict=False))
    tokenizer.add_special_tokens(
        [AddedToken(t, special=True, normalized=False) for t, kind in kinds if kind == _CONTROL]
    )
    tokenizer.add_tokens([AddedToken(t, special=False, normalized=False) for t, kind in kinds if kind == _USER_DEFINED])
    ids = {n: field(f"{n}_token_id") for n in ("bos", "eos", "unknown", "padding")}
    specials = {f"{n[:3]}_token": "" if i is None else tokens[i] for n, i in ids.items()}
    return ChatTokenizer(
        tokenizer,
        frozenset(int(i) for n in _ENDS if (i := field(n)) is not None),
        fields.get("tokenizer.chat_template"),
        specials,
        [int(ids["bos"])] if field("add_bos_token", False) and ids["bos"] is not None else [],
    )


def _pre_tokenizer(name: str) -> pre_tokenizers.PreTokenizer:
    if name in _GPT2:
        return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    if name in _SINGLE_DIGITS:
        return pre_tokenizers.Sequence(
            [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
        )
    if name in _SPLITS:
        split = pre_tokenizers.Split(Regex(_SPLITS[name]), behavior="isolated")
        return pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    known = ", ".join([*_GPT2, *_SINGLE_DIGITS, *_SPLITS])
    raise ValueError(f"tokenizer.ggml.pre {name!r} is not known; supported: {known}")
