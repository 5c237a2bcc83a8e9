"""The tokenizer and chat templates of a Hugging Face directory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from hostring.integrations.llm.checkpoint.chat_template import DEFAULT, templates_of
from hostring.integrations.llm.checkpoint.chat_tokenizer import ChatTokenizer
from hostring.integrations.llm.checkpoint.json_file import read_optional_json


def read_hf_tokenizer(directory: Path) -> ChatTokenizer:
    """Read `tokenizer.json`, and what the files beside it say of special tokens and templates.

    Raises:
        FileNotFoundError: there is no tokenizer.json.
        ValueError: a file that can't be read.
    """
    file = directory / "tokenizer.json"
    if not file.exists():
        raise FileNotFoundError(f"no tokenizer.json in {directory}")
    try:
        tokenizer = Tokenizer.from_file(str(file))
    except Exception as exc:  # the library raises Exception itself
        raise ValueError(f"{file} can't be read: {exc}") from exc
    settings = {
        **read_optional_json(directory / "special_tokens_map.json"),
        **read_optional_json(directory / "tokenizer_config.json"),
    }
    specials = {name: text for name, value in settings.items() if name.endswith("_token") and (text := _text(value))}
    return ChatTokenizer(
        tokenizer,
        _eos_ids(directory, tokenizer, specials.get("eos_token", "")),
        _templates(directory, settings),
        specials,
    )


def _templates(directory: Path, settings: dict[str, Any]) -> dict[str, str]:
    """Files come before what tokenizer_config.json says."""
    single = directory / "chat_template.jinja"
    named = {file.stem: file for file in sorted((directory / "additional_chat_templates").glob("*.jinja"))}
    files = {**({DEFAULT: single} if single.exists() else {}), **named}
    if files:
        return {name: file.read_text(encoding="utf-8") for name, file in files.items()}
    legacy = read_optional_json(directory / "chat_template.json")
    try:
        return templates_of(settings.get("chat_template", legacy.get("chat_template")))
    except ValueError as exc:
        raise ValueError(f"{directory / 'tokenizer_config.json'}: {exc}") from None


def _eos_ids(directory: Path, tokenizer: Tokenizer, eos_token: str) -> frozenset[int]:
    found: set[int] = set()
    for name in ("generation_config.json", "config.json"):
        ids = read_optional_json(directory / name).get("eos_token_id")
        found.update([ids] if isinstance(ids, int) else ids or [])
    if eos_token and (named := tokenizer.token_to_id(eos_token)) is not None:
        found.add(named)
    return frozenset(found)


def _text(token: Any) -> str:
    """A special token is a string, or a dict that holds it as "content"."""
    found = token.get("content") if isinstance(token, dict) else token
    return found if isinstance(found, str) else ""
