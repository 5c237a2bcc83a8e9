"""Text and ids: HF directories, chat templates, and text that comes one token at a time."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from llm_models import CHAT, TEXT, byte_tokenizer

from hostring.integrations.llm.checkpoint.chat_tokenizer import ChatTokenizer
from hostring.integrations.llm.checkpoint.gguf_tokenizer import tokenizer_from_fields
from hostring.integrations.llm.checkpoint.tokenizer import load_tokenizer

BYTES = ChatTokenizer(byte_tokenizer(400), frozenset({1}), CHAT)


def directory(tmp_path: Path, settings: dict[str, object], **files: object) -> Path:
    byte_tokenizer(400).save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")
    for name, content in files.items():
        (tmp_path / f"{name}.json").write_text(json.dumps(content), encoding="utf-8")
    return tmp_path


@given(st.text(max_size=40))
def test_pieces_joined_are_the_text(text: str) -> None:
    ids, stream = BYTES.encode(text), BYTES.stream()
    pieces = [stream.push(i) for i in ids]
    assert "".join(pieces) + stream.finish() == BYTES.decode(ids)


def test_a_piece_never_ends_inside_a_character() -> None:
    ids, stream = BYTES.encode("🙂東é"), BYTES.stream()
    assert len(ids) > 3  # the emoji alone is four bytes that the vocabulary spells one by one
    pieces = [stream.push(i) for i in ids]
    assert not any("\ufffd" in p for p in pieces)
    assert "".join(pieces) == "🙂東é"
    assert stream.finish() == ""


def test_an_unfinished_character_shows_at_the_end() -> None:
    ids, stream = BYTES.encode("a🙃")[:-1], BYTES.stream()
    assert "".join(stream.push(i) for i in ids) == "a"
    assert stream.finish() == "\ufffd"


def test_special_tokens_are_not_text() -> None:
    start, end = BYTES.tokenizer.token_to_id("<start>"), BYTES.tokenizer.token_to_id("<end>")
    ids = [start, *BYTES.encode("the earth"), end]
    assert BYTES.decode(ids) == "the earth"
    stream = BYTES.stream()
    assert "".join(stream.push(i) for i in ids) + stream.finish() == "the earth"


def test_stop_tokens_come_from_every_place_that_names_one(tmp_path: Path) -> None:
    path = directory(
        tmp_path,
        {"eos_token": {"content": "<end>"}},
        generation_config={"eos_token_id": [7, 9]},
        config={"eos_token_id": 11},
    )
    assert load_tokenizer(path).eos_ids == {7, 9, 11, byte_tokenizer(400).token_to_id("<end>")}


def test_the_template_may_be_a_string_a_list_or_a_file(tmp_path: Path) -> None:
    path = directory(
        tmp_path, {"chat_template": [{"name": "tools", "template": "no"}, {"name": "default", "template": CHAT}]}
    )
    assert load_tokenizer(path).template == CHAT
    (path / "chat_template.jinja").write_text("{{ messages[0].content }}!", encoding="utf-8")
    assert load_tokenizer(path).chat([{"role": "user", "content": "hi"}]) == BYTES.encode("hi!")


def test_a_template_gets_what_templates_ask_for(tmp_path: Path) -> None:
    template = (
        "{{ eos_token }}{{ messages | tojson }}{% if enable_thinking is defined %}{{ enable_thinking }}{% endif %}"
    )
    path = directory(tmp_path, {"eos_token": "<end>", "chat_template": template})
    ids = load_tokenizer(path).chat([{"role": "user", "content": "é"}], enable_thinking=False)
    assert BYTES.tokenizer.decode(ids, skip_special_tokens=False) == '<end>[{"role": "user", "content": "é"}]False'


def test_a_template_can_refuse_and_can_be_missing(tmp_path: Path) -> None:
    path = directory(tmp_path, {"chat_template": "{{ raise_exception('roles must alternate') }}"})
    with pytest.raises(ValueError, match="refused the messages: roles must alternate"):
        load_tokenizer(path).chat([])
    path = directory(tmp_path, {})
    with pytest.raises(ValueError, match="no chat template"):
        load_tokenizer(path).chat([])


def test_a_template_runs_in_a_sandbox(tmp_path: Path) -> None:
    path = directory(tmp_path, {"chat_template": "{{ ''.__class__.__mro__[1].__subclasses__() }}"})
    with pytest.raises(ValueError, match="unsafe"):
        load_tokenizer(path).chat([])


def test_no_tokenizer_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"no tokenizer\.json"):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize(
    ("name", "digits"), [("smollm", ["1", "2", "3", "4"]), ("qwen2", ["1", "2", "3", "4"]), ("llama-bpe", ["123", "4"])]
)
def test_digits_are_cut_as_the_name_says(name: str, digits: list[str]) -> None:
    alphabet = json.loads(byte_tokenizer(400).to_str())["model"]
    tokens = [t for t, _ in sorted(alphabet["vocab"].items(), key=lambda kv: kv[1])]
    extra = ["12", "123", "1234"]
    fields = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": name,
        "tokenizer.ggml.tokens": tokens + extra,
        "tokenizer.ggml.merges": ["1 2", "12 3", "123 4"],
        "tokenizer.ggml.token_type": [1] * (len(tokens) + len(extra)),
        "tokenizer.ggml.add_bos_token": True,
        "tokenizer.ggml.bos_token_id": 0,
        "tokenizer.ggml.eos_token_id": 1,
        "tokenizer.ggml.eot_token_id": 2,
    }
    tokenizer = tokenizer_from_fields(fields)
    ids = tokenizer.encode("1234")
    assert ids[0] == 0
    assert [tokenizer.tokenizer.id_to_token(i) for i in ids[1:]] == digits
    assert tokenizer.eos_ids == {1, 2}
    assert tokenizer.decode(tokenizer.encode(TEXT)[1:]) == TEXT
