"""Text to token ids and back, and the chat template, all from the checkpoint."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

from jinja2.exceptions import TemplateError
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream


class ChatTokenizer:
    """A tokenizer with its stop tokens and chat template.

    Attributes:
        tokenizer: the `tokenizers.Tokenizer` underneath.
        eos_ids: any of these ends a generation.
        template: the jinja chat template, None when the checkpoint has none.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        eos_ids: frozenset[int],
        template: str | None = None,
        specials: Mapping[str, str] | None = None,
        prefix: Sequence[int] = (),
    ) -> None:
        self.tokenizer = tokenizer
        self.eos_ids = eos_ids
        self.template = template
        self._specials = dict(specials or {})
        self._prefix = list(prefix)

    @property
    def vocab_size(self) -> int:
        return int(self.tokenizer.get_vocab_size())

    def encode(self, text: str) -> list[int]:
        """Ids of plain text, after the tokens that the checkpoint puts first (such as a BOS)."""
        return [*self._prefix, *self.tokenizer.encode(text, add_special_tokens=not self._prefix).ids]

    def decode(self, ids: Sequence[int]) -> str:
        """Text of ids, without special tokens."""
        return str(self.tokenizer.decode(list(ids), skip_special_tokens=True))

    def chat(self, messages: Sequence[Mapping[str, str]], **variables: Any) -> list[int]:
        """Ids of a conversation, ready for the model's answer.

        Args:
            messages: dicts with "role" (system, user, assistant) and "content".
            variables: further variables of the template, such as Qwen3's `enable_thinking`.

        Raises:
            ValueError: the checkpoint has no chat template, or the template refuses the messages.
        """
        if self.template is None:
            raise ValueError("this checkpoint has no chat template; use encode() on plain text")
        environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
        environment.filters["tojson"] = lambda value, **options: json.dumps(value, ensure_ascii=False, **options)
        environment.globals["raise_exception"] = _refuse
        environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
        try:
            text = environment.from_string(self.template).render(
                messages=[dict(m) for m in messages], add_generation_prompt=True, **self._specials, **variables
            )
        except TemplateError as exc:
            raise ValueError(f"the chat template refused the messages: {exc}") from exc
        return list(self.tokenizer.encode(text, add_special_tokens=False).ids)

    def stream(self) -> TextStream:
        """A decoder for tokens that come one at a time."""
        return TextStream(self)


class TextStream:
    """Tokens in, pieces of text out. A piece never ends inside a character; the pieces joined are the whole text."""

    def __init__(self, tokenizer: ChatTokenizer) -> None:
        self._tokenizer = tokenizer
        self._stream = DecodeStream(skip_special_tokens=True)
        self._ids: list[int] = []
        self._emitted = ""

    def push(self, token: int) -> str:
        """The text that `token` completes; empty while a character is unfinished."""
        self._ids.append(token)
        piece: str = self._stream.step(self._tokenizer.tokenizer, token) or ""
        self._emitted += piece
        return piece

    def finish(self) -> str:
        """What is left when no more tokens come: an unfinished character shows as U+FFFD."""
        whole = self._tokenizer.decode(self._ids)
        return whole[len(self._emitted) :] if whole.startswith(self._emitted) else ""


def _refuse(message: str) -> NoReturn:
    raise TemplateError(message)


def load_tokenizer(path: str | Path) -> ChatTokenizer:
    """The tokenizer of a GGUF file or of a HF directory.

    Raises:
        FileNotFoundError: the directory has no tokenizer.json.
        ValueError: a kind of tokenizer that is not supported.
    """
    path = Path(path)
    if path.suffix == ".gguf":
        from hostring.integrations.llm.checkpoint.gguf_tokenizer import read_gguf_tokenizer

        return read_gguf_tokenizer(path)
    directory = path if path.is_dir() else path.parent
    file = directory / "tokenizer.json"
    if not file.exists():
        raise FileNotFoundError(f"no tokenizer.json in {directory}")
    tokenizer = Tokenizer.from_file(str(file))
    settings = _optional_json(directory / "tokenizer_config.json")
    template = directory / "chat_template.jinja"
    specials = {f"{n}_token": _text(settings.get(f"{n}_token")) for n in ("bos", "eos", "unk", "pad")}
    return ChatTokenizer(
        tokenizer,
        _hf_eos_ids(directory, tokenizer, specials["eos_token"]),
        template.read_text() if template.exists() else _default_template(settings.get("chat_template")),
        specials,
    )


def _hf_eos_ids(directory: Path, tokenizer: Tokenizer, eos_token: str) -> frozenset[int]:
    found: set[int] = set()
    for name in ("generation_config.json", "config.json"):
        ids = _optional_json(directory / name).get("eos_token_id")
        found.update([ids] if isinstance(ids, int) else ids or [])
    if eos_token and (named := tokenizer.token_to_id(eos_token)) is not None:
        found.add(named)
    return frozenset(found)


def _default_template(template: Any) -> str | None:
    """A string, or a list of named ones of which "default" is meant."""
    if isinstance(template, list):
        template = {t["name"]: t["template"] for t in template}.get("default")
    return None if template is None else str(template)


def _text(token: Any) -> str:
    """A special token is a string, or a dict that holds it as "content"."""
    return str(token["content"] if isinstance(token, dict) else token or "")


def _optional_json(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    return found
