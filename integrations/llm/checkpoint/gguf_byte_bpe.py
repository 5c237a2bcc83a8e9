"""Byte-level BPE of GGUF files (`tokenizer.ggml.model` "gpt2"), rebuilt for the `tokenizers` library."""

from __future__ import annotations

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

from hostring.integrations.llm.checkpoint.gguf_vocabulary import Vocabulary, texts_of

# How text is cut before merging, as in llama.cpp's src/llama-vocab.cpp, by the name in tokenizer.ggml.pre.
_QWEN2 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_LLAMA3 = _QWEN2.replace(r"|\p{N}| ?", r"|\p{N}{1,3}| ?")
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_TEKKEN = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_WHOLE_WORDS = ("llama-bpe", "llama3", "llama-v3", "falcon3", "pixtral", "tekken")  # a word that is a token is not cut
_SPLITS = {
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "megrez"), _QWEN2),
    **dict.fromkeys((*_WHOLE_WORDS[:-1], "smaug-bpe", "dbrx"), _LLAMA3),
    "tekken": _TEKKEN,
}
_GPT2 = ("gpt-2", "gpt2", "default")
_SINGLE_DIGITS = ("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone")


def byte_bpe(vocabulary: Vocabulary) -> Tokenizer:
    """The tokenizer.

    Raises:
        ValueError: cut by rules that are not known here, or merges that are missing or don't fit.
    """
    fields = vocabulary.fields
    name = str(fields.get("pre", "default"))
    cut = _pre_tokenizer(fields.source, name)
    pairs = texts_of(fields, "merges", "a list of texts; byte-level BPE needs tokens and merges")
    merges = [(pair[:at], pair[at + 1 :]) for pair in pairs if (at := pair.find(" ", 1)) > 0]
    ids = {token: i for i, token in enumerate(vocabulary.tokens)}
    try:
        tokenizer = Tokenizer(models.BPE(ids, merges, ignore_merges=name in _WHOLE_WORDS))
    except Exception as exc:  # the library raises Exception itself
        raise ValueError(f"{fields.source}: tokenizer.ggml.merges don't fit tokenizer.ggml.tokens: {exc}") from exc
    tokenizer.pre_tokenizer = cut
    tokenizer.decoder = decoders.ByteLevel()
    vocabulary.add_to(tokenizer)
    first = "bos" if fields.flag("add_bos_token", name in _WHOLE_WORDS) else None
    vocabulary.surround(tokenizer, first, "eos" if fields.flag("add_eos_token") else None)
    return tokenizer


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
