"""Chat templates, rendered to the text that `transformers.apply_chat_template` gives for the same template and
messages."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, NoReturn

from jinja2 import nodes
from jinja2.exceptions import TemplateError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment

_REASONING = ("reasoning_content", "thinking", "reasoning")  # what a message's reasoning is called; the first is usual
DEFAULT = "default"


class _Generation(Extension):
    """`{% generation %}` marks what the assistant said, for training. The text is rendered as it stands."""

    tags = {"generation"}  # noqa: RUF012  # as jinja2 declares it

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_render"), [], [], body).set_lineno(line)

    def _render(self, caller: Macro) -> str:
        return str(caller())


class ChatTemplates:
    """The templates of one checkpoint, by name. Most checkpoints have one, "default".

    Args:
        sources: jinja sources by name.
        specials: what templates see beside the messages, such as `eos_token`.
    """

    def __init__(self, sources: Mapping[str, str], specials: Mapping[str, str]) -> None:
        self.sources = dict(sources)
        self._specials = dict(specials)

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        name: str | None = None,
        add_generation_prompt: bool = True,
        **variables: Any,
    ) -> str:
        """The text of a conversation.

        Args:
            messages: dicts with "role" and "content". Keys whose value is None are left out.
            tools: JSON schemas of functions that the model may call.
            documents: dicts with "title" and "text".
            name: of the template; when not given, "tool_use" if there is one and tools are given, else "default".
            add_generation_prompt: end with the start of the model's answer.
            variables: further variables of the template, such as Qwen3's `enable_thinking`.

        Raises:
            ValueError: there is no such template, or it refuses the messages, or it fails.
        """
        source = self.sources[self._chosen(name, tools)]
        try:
            template = _environment().from_string(source)
            return template.render(
                messages=[_message(m) for m in messages],
                tools=None if tools is None else list(tools),
                documents=None if documents is None else list(documents),
                add_generation_prompt=add_generation_prompt,
                **{**self._specials, **variables},
            )
        except TemplateError as exc:
            raise ValueError(f"the chat template refused the messages: {exc}") from exc
        except Exception as exc:  # a template is a program, and may fail like one
            raise ValueError(f"the chat template failed: {type(exc).__name__}: {exc}") from exc

    def _chosen(self, name: str | None, tools: Any) -> str:
        if not self.sources:
            raise ValueError("this checkpoint has no chat template; use encode() on plain text")
        if name is None:
            name = "tool_use" if tools is not None and "tool_use" in self.sources else DEFAULT
        if name not in self.sources:
            raise ValueError(f"this checkpoint has no chat template {name!r}; it has {', '.join(sorted(self.sources))}")
        return name


def templates_of(found: Any) -> dict[str, str]:
    """Templates by name, of the forms that `chat_template` has in files: one, a dict, or a list of named ones.

    Raises:
        ValueError: another form.
    """
    if found is None:
        return {}
    if isinstance(found, str):
        return {DEFAULT: found}
    if isinstance(found, list) and all(
        isinstance(one, Mapping) and {"name", "template"} <= one.keys() for one in found
    ):
        found = {one["name"]: one["template"] for one in found}
    if isinstance(found, Mapping) and all(isinstance(value, str) for value in found.values()):
        return {str(name): source for name, source in found.items()}
    raise ValueError(f"chat_template is a {type(found).__name__}; expected a template, or templates by name")


def _environment() -> ImmutableSandboxedEnvironment:
    """What `transformers` gives templates."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _refuse
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return environment


def _tojson(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    """jinja2's own escapes HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _refuse(message: str) -> NoReturn:
    raise TemplateError(message)


def _message(message: Mapping[str, Any]) -> dict[str, Any]:
    """Without keys that say nothing, and with the reasoning under each name that templates read."""
    if not isinstance(message, Mapping):
        raise ValueError(f"a message is a {type(message).__name__}; expected a dict with role and content")
    kept = {key: value for key, value in message.items() if value is not None}
    reasoning = next((kept[name] for name in _REASONING if name in kept), None)
    return kept if reasoning is None else {"thinking": reasoning, **kept, "reasoning_content": reasoning}
