"""Tokenizers of GGUF files beside what they were made from: `sentencepiece` models, and WordPiece of `tokenizers`."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import pytest
import sentencepiece
import tokenizers
from gguf import TokenType
from llm_models import TEXT
from tokenizers.processors import TemplateProcessing

from hostring.integrations.llm.checkpoint.gguf_tokenizer import tokenizer_from_fields
from hostring.integrations.llm.checkpoint.tokenizer import load_tokenizer

CORPUS = [
    TEXT,
    "A ring of unlike machines computes one sum. Every rank gets the same bits, whatever the order of arrival.",
    "The quick brown fox jumps over the lazy dog; THE QUICK BROWN FOX JUMPED over 12 lazy dogs, 3456 times!",
    "def fold(values):\n    total = 0.0\n    for value in values:\n        total += value\n    return total",
    "Über die Brücke ging Zoë, déjà vu: ¿qué? Смотри, 東京 and 大阪.",
] * 8
OWN = "<|own|>"
TEXTS = [
    *CORPUS[:5],
    " ",
    "  ",
    "a",
    "a  b   c    d ",
    "   leading and trailing   ",
    "\n\n\ttabs\r\n and \u00a0 other\u3000spaces",
    "emoji 🙂🙃👩‍👩‍👧 and ﬁ ½ Å e\u0301",
    "\u2581 marks spaces, <0x41> doesn't",
    "人工知能は 東京で 1234567890",
    "aaaaaaaaaaaaaaaaa bbbb aaab",
]
SPECIALS = ["<s>once</s> upon", "two<s>  </s>three"]


def trained(kind: str, **options: Any) -> Any:
    out = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(CORPUS),
        model_writer=out,
        model_type=kind,
        vocab_size=420 if kind == "bpe" else 130,
        user_defined_symbols=[OWN],
        minloglevel=2,
        **options,
    )
    return sentencepiece.SentencePieceProcessor(model_proto=out.getvalue())


@pytest.fixture(scope="module")
def bpe() -> Any:
    return trained("bpe", byte_fallback=True, normalization_rule_name="identity", remove_extra_whitespaces=False)


@pytest.fixture(scope="module")
def unigram() -> Any:
    return trained("unigram")


def kind_of(model: Any, i: int) -> int:
    for kind, is_it in ((2, model.is_unknown), (3, model.is_control), (5, model.is_unused), (6, model.is_byte)):
        if is_it(i):
            return kind
    return int(TokenType.USER_DEFINED if model.id_to_piece(i) == OWN else TokenType.NORMAL)


def written(model: Any, kind: str, path: Path, change: Callable[[gguf.GGUFWriter], None] = lambda w: None) -> Path:
    """A GGUF file with the tokenizer of a sentencepiece model, as llama.cpp's converter writes it."""
    ids = range(model.get_piece_size())
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tokenizer_model(kind)
    writer.add_token_list([model.id_to_piece(i) for i in ids])
    writer.add_token_scores([model.get_score(i) for i in ids])
    writer.add_token_types([kind_of(model, i) for i in ids])
    writer.add_bos_token_id(model.bos_id())
    writer.add_eos_token_id(model.eos_id())
    writer.add_unk_token_id(model.unk_id())
    change(writer)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def streamed(tokenizer: Any, ids: list[int]) -> str:
    stream = tokenizer.stream()
    return "".join([stream.push(i) for i in ids]) + str(stream.finish())


@pytest.mark.parametrize("prefix", [True, False])
def test_sentencepiece_bpe(prefix: bool, bpe: Any, tmp_path: Path) -> None:
    model = bpe if prefix else trained("bpe", byte_fallback=True, normalization_rule_name="identity",
                                       remove_extra_whitespaces=False, add_dummy_prefix=False)  # fmt: skip
    path = written(model, "llama", tmp_path / "m.gguf", lambda writer: writer.add_add_space_prefix(prefix))
    tokenizer = load_tokenizer(path)
    for text in TEXTS:
        ids = tokenizer.encode(text)
        assert ids == [model.bos_id(), *model.encode(text)], text
        assert tokenizer.decode(ids) == model.decode(ids) == text.replace("\u2581", " ")
        assert streamed(tokenizer, ids) == tokenizer.decode(ids)
    assert tokenizer.encode_bare("a ring") == model.encode("a ring")
    assert tokenizer.eos_ids == {model.eos_id()}
    assert tokenizer.vocab_size == model.get_piece_size()


def test_sentencepiece_unigram(unigram: Any, tmp_path: Path) -> None:
    def prepared(writer: gguf.GGUFWriter) -> None:
        normalizer = messages_of(messages_of(unigram.serialized_model_proto())[3])
        writer.add_precompiled_charsmap(normalizer[2])
        writer.add_remove_extra_whitespaces(True)

    tokenizer = load_tokenizer(written(unigram, "t5", tmp_path / "m.gguf", prepared))
    for text in TEXTS:
        ids = tokenizer.encode(text)
        assert ids == [*unigram.encode(text), unigram.eos_id()], text
        if unigram.unk_id() not in ids:  # sentencepiece decodes it as " ⁇ ", tokenizers as <unk>
            assert tokenizer.decode(ids) == unigram.decode(ids)
        assert streamed(tokenizer, ids) == tokenizer.decode(ids)
    assert tokenizer.encode("ﬁ  Å") == tokenizer.encode("fi Å")  # normalised


def messages_of(message: bytes) -> dict[int, bytes]:
    """The fields of a protobuf message that are bytes or messages themselves."""
    found, at = {}, 0

    def number() -> int:
        nonlocal at
        value = shift = 0
        while True:
            byte = message[at]
            at, value, shift = at + 1, value | (byte & 127) << shift, shift + 7
            if byte < 128:
                return value

    while at < len(message):
        key = number()
        if key & 7 == 0:
            number()
            continue
        length = {1: 8, 5: 4}.get(key & 7) or number()
        found[key >> 3] = message[at : at + length]
        at += length
    return found


@pytest.mark.parametrize("lowercase", [True, False])
def test_wordpiece(lowercase: bool) -> None:
    source = tokenizers.BertWordPieceTokenizer(lowercase=lowercase)
    source.train_from_iterator(CORPUS, vocab_size=300, show_progress=False)
    tokens = [source.id_to_token(i) for i in range(source.get_vocab_size())]
    first, last, unknown = (source.token_to_id(token) for token in ("[CLS]", "[SEP]", "[UNK]"))
    source.add_special_tokens(["[CLS]", "[SEP]"])
    source.post_processor = TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", first), ("[SEP]", last)]
    )

    def marked(token: str) -> str:  # as llama.cpp's converter does
        return token if token[0] + token[-1] == "[]" else token[2:] if token.startswith("##") else f"\u2581{token}"

    fields = {
        "tokenizer.ggml.model": "bert",
        "tokenizer.ggml.tokens": [marked(token) for token in tokens],
        "tokenizer.ggml.token_type": [3 if i < 5 else 1 for i in range(len(tokens))],
        "tokenizer.ggml.bos_token_id": first,
        "tokenizer.ggml.seperator_token_id": last,
        "tokenizer.ggml.unknown_token_id": unknown,
    }
    told = {"tokenizer.ggml.normalizer.lowercase": lowercase, "tokenizer.ggml.normalizer.strip_accents": lowercase}
    for tokenizer in (tokenizer_from_fields(fields), tokenizer_from_fields({**fields, **told})):
        for text in [*TEXTS, "[CLS] twice [SEP]"]:
            ids = tokenizer.encode(text)
            assert ids == source.encode(text).ids, text
            assert tokenizer.decode(ids) == source.decode(ids)
            assert streamed(tokenizer, ids) == tokenizer.decode(ids)


def test_special_tokens_are_found_and_a_space_follows_them_as_in_llama_cpp(bpe: Any, tmp_path: Path) -> None:
    """Compared with llama.cpp's own tokenizer by hand; sentencepiece knows no control tokens in texts."""
    tokenizer = load_tokenizer(written(bpe, "llama", tmp_path / "m.gguf"))
    bos, eos, own = bpe.bos_id(), bpe.eos_id(), bpe.piece_to_id(OWN)
    assert tokenizer.encode_bare("<s>a ring</s> b") == [bos, *bpe.encode("a ring"), eos, *bpe.encode(" b")]
    assert tokenizer.encode_bare(f"a{OWN}b") == [*bpe.encode("a"), own, *bpe.encode("b")]
    assert tokenizer.encode_bare("<unk>") == [bpe.unk_id()]
    assert tokenizer.decode(tokenizer.encode("<s>a ring</s>")) == "a ring"


def test_a_stream_goes_on_after_bytes_that_spell_no_character(bpe: Any, tmp_path: Path) -> None:
    tokenizer = load_tokenizer(written(bpe, "llama", tmp_path / "m.gguf"))
    smile = [bpe.piece_to_id(f"<0x{byte:02X}>") for byte in "🙂".encode()]
    ids = [*smile, smile[0], smile[1], *bpe.encode("a ring"), *smile]
    assert streamed(tokenizer, ids) == "🙂\ufffd\ufffd a ring🙂"


def test_an_answer_ends_at_every_token_that_ends_a_turn_or_a_document() -> None:
    tokens = ["<unk>", "a", "<|im_end|>", "<|endoftext|>", "</s>", "<|im_start|>"]
    fields = {"model": "llama", "tokens": tokens, "scores": [0.0] * 6, "token_type": [2, 1, 3, 3, 1, 3]}
    values = {f"tokenizer.ggml.{key}": value for key, value in {**fields, "eos_token_id": 5}.items()}
    assert tokenizer_from_fields(values).eos_ids == {2, 3, 5}  # </s> is an ordinary token here


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model": "rwkv"}, r"tokenizer\.ggml\.model 'rwkv' is not supported; supported are 'gpt2' \(byte-level BPE\)"),
        ({"scores": None}, r"tokenizer\.ggml\.scores is None; expected a list of 3 numbers, one per token"),
        ({"scores": [0.0]}, r"tokenizer\.ggml\.scores is \[0\.0\]; expected a list of 3 numbers"),
        ({"token_type": [1]}, r"tokenizer\.ggml\.token_type is \[1\]; expected a list of 3 numbers"),
        ({"tokens": [1]}, r"tokenizer\.ggml\.tokens is \[1\]; expected a list of texts"),
        ({"eos_token_id": 3}, r"eos_token_id is 3; expected the id of one of the 3 tokens"),
        ({"add_space_prefix": 1}, r"add_space_prefix is 1; expected true or false"),
    ],
)
def test_errors_name_the_key(change: dict[str, Any], message: str) -> None:
    fields = {"model": "llama", "tokens": ["<unk>", "a", "b"], "scores": [0.0, -1.0, -2.0], "token_type": [2, 1, 1]}
    values = {f"tokenizer.ggml.{key}": value for key, value in {**fields, **change}.items()}
    with pytest.raises(ValueError, match=message) as caught:
        tokenizer_from_fields(values, "m.gguf")
    assert "m.gguf" in str(caught.value)
