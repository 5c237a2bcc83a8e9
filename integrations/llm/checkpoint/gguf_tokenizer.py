"""The tokenizer inside a GGUF file: byte-level BPE, rebuilt for the `tokenizers` library."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers

from hostring.integrations.llm.checkpoint.chat_template import DEFAULT
from hostring.integrations.llm.checkpoint.chat_tokenizer import ChatTokenizer
from hostring.integrations.llm.checkpoint.fields import Fields
from hostring.integrations.llm.checkpoint.gguf_header import map_file, read_header

_CONTROL, _USER_DEFINED = 3, 4
_ENDS = ("eos_token_id", "eot_token_id", "eom_token_id")
_TEMPLATE = "tokenizer.chat_template"

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
    with map_file(path) as data:
        fields, _ = read_header(path, data)
    return tokenizer_from_fields(fields, path)


def tokenizer_from_fields(values: Mapping[str, Any], source: object = "GGUF metadata") -> ChatTokenizer:
    """Build the tokenizer that GGUF metadata describes.

    Args:
        values: the metadata.
        source: the file, for errors.

    Raises:
        ValueError: not byte-level BPE, cut by rules that are not known here, or a list that is missing.
    """
    fields = Fields(source, values, "tokenizer.ggml.")
    if fields.get("model") != "gpt2":
        raise ValueError(
            f"{source}: tokenizer.ggml.model {fields.get('model')!r} is not supported; byte-level BPE ('gpt2') is"
        )
    pre = str(fields.get("pre", "default"))
    cut = _pre_tokenizer(source, pre)
    tokens = _texts(fields, "tokens")
    merges = [(left, right) for left, _, right in (pair.partition(" ") for pair in _texts(fields, "merges"))]
    vocabulary = {t: i for i, t in enumerate(tokens)}
    try:
        tokenizer = Tokenizer(models.BPE(vocabulary, merges, ignore_merges=pre in ("llama-bpe", "llama3")))
    except Exception as exc:  # the library raises Exception itself
        raise ValueError(f"{source}: tokenizer.ggml.merges don't fit tokenizer.ggml.tokens: {exc}") from exc
    tokenizer.pre_tokenizer = cut
    tokenizer.decoder = decoders.ByteLevel()
    kinds = list(zip(tokens, fields.get("token_type", []), strict=False))
    tokenizer.add_special_tokens(
        [AddedToken(t, special=True, normalized=False) for t, kind in kinds if kind == _CONTROL]
    )
    tokenizer.add_tokens([AddedToken(t, special=False, normalized=False) for t, kind in kinds if kind == _USER_DEFINED])
    ids = {n: _id(fields, f"{n}_token_id", len(tokens)) for n in ("bos", "eos", "unknown", "padding")}
    return ChatTokenizer(
        tokenizer,
        frozenset(i for n in _ENDS if (i := _id(fields, n, len(tokens))) is not None),
        _templates(values),
        {f"{n[:3]}_token": tokens[i] for n, i in ids.items() if i is not None},
        [ids["bos"]] if fields.flag("add_bos_token") and ids["bos"] is not None else [],
    )


def _texts(fields: Fields, name: str) -> list[str]:
    found = fields.get(name)
    if not isinstance(found, list) or not all(isinstance(text, str) for text in found):
        raise fields.wrong(name, "a list of texts; byte-level BPE needs tokens and merges")
    return found


def _id(fields: Fields, name: str, n_tokens: int) -> int | None:
    found = fields.get(name)
    if found is not None and not (isinstance(found, int) and 0 <= found < n_tokens):
        raise fields.wrong(name, f"the id of one of the {n_tokens} tokens")
    return found


def _templates(values: Mapping[str, Any]) -> dict[str, str]:
    """The one without a name is the default; others are `tokenizer.chat_template.NAME`."""
    found = {key.removeprefix(f"{_TEMPLATE}."): str(v) for key, v in values.items() if key.startswith(f"{_TEMPLATE}.")}
    single = values.get(_TEMPLATE)
    return found if single is None else {**found, DEFAULT: str(single)}


def _pre_tokenizer(source: object, name: str) -> pre_tokenizers.PreTokenizer:
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
    raise ValueError(f"{source}: tokenizer.ggml.pre {name!r} is not known; supported: {known}")
