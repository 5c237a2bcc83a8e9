"""The messages of a chat request: checked, and turned into the ids of a prompt."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hostring.integrations.llm.serve.http.answer_parts import THINK, THOUGHT
from hostring.integrations.llm.serve.http.errors import ApiError, invalid
from hostring.integrations.llm.serve.http.fields import BodyFields
from hostring.integrations.llm.serve.http.service import Service
from hostring.integrations.llm.serve.http.tools import BEGIN, Tools

_ROLES = ("system", "developer", "user", "assistant", "tool")
Message = dict[str, Any]


def read_messages(fields: BodyFields) -> list[Message]:
    """The messages as chat templates want them.

    Raises:
        ApiError: there are none, or one of them is wrong.
    """
    found = fields.get("messages")
    if found is None:
        raise invalid("messages", "Missing required parameter: 'messages'.", "missing_required_parameter")
    if not isinstance(found, list) or not found:
        raise fields.wrong("messages", "a list of at least one message")
    return [_message(message, f"messages[{i}]") for i, message in enumerate(found)]


def _message(found: Any, where: str) -> Message:
    if not isinstance(found, dict):
        raise invalid(where, f"{where} is no object with role and content", "invalid_type")
    fields = BodyFields(found, where)
    role = fields.get("role")
    if role not in _ROLES:
        raise invalid(f"{where}.role", f"{where}.role is {role!r}; expected one of {', '.join(_ROLES)}")
    message: Message = {"role": "system" if role == "developer" else role}
    content = _content(found.get("content"), f"{where}.content")
    calls = found.get("tool_calls")
    if content is None and not (role == "assistant" and calls):
        raise invalid(f"{where}.content", f"{where}.content is missing")
    message["content"] = content or ""
    if calls is not None:
        message["tool_calls"] = _tool_calls(calls, f"{where}.tool_calls")
    for name in ("tool_call_id", "name", "reasoning_content"):
        if (text := fields.text(name)) is not None:
            message[name] = text
    return message


def _content(found: Any, where: str) -> str | None:
    """Text, of the forms that content has: a string, or a list of parts that hold text."""
    if found is None or isinstance(found, str):
        return found
    if not isinstance(found, list):
        raise invalid(where, f"{where} is neither a string nor a list of parts", "invalid_type")
    texts = []
    for i, part in enumerate(found):
        kind = part.get("type") if isinstance(part, dict) else None
        if kind not in ("text", "refusal") or not isinstance(part.get(kind), str):
            raise invalid(f"{where}[{i}]", f"{where}[{i}] is of type {kind!r}; this model reads text only")
        texts.append(part[kind])
    return "".join(texts)


def _tool_calls(found: Any, where: str) -> list[dict[str, Any]]:
    """Calls of an earlier turn. Templates want their arguments as objects; OpenAI sends them as text."""
    if not isinstance(found, list):
        raise invalid(where, f"{where} is no list", "invalid_type")
    calls = []
    for i, call in enumerate(found):
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise invalid(f"{where}[{i}]", f"{where}[{i}] has no function with a name")
        arguments = function.get("arguments", "{}")
        if isinstance(arguments, str):
            with contextlib.suppress(ValueError):  # what a model wrote need not be JSON
                arguments = json.loads(arguments or "{}")
        calls.append({**call, "function": {**function, "arguments": arguments}})
    return calls


@dataclass(frozen=True)
class Prompt:
    """What the model continues. `may_think`: it may begin with thoughts. `thinks`: it is in the middle of them."""

    ids: list[int]
    may_think: bool = False
    thinks: bool = False


def prompt_of(
    messages: Sequence[Message], service: Service, variables: Mapping[str, Any], tools: Tools | None = None
) -> Prompt:
    """The prompt of a conversation. A model without a chat template continues the texts of the messages, a line each.

    Raises:
        ApiError: the template refuses the messages, or a text can't be encoded.
    """
    tokenizer = service.tokenizer
    template = tokenizer.template or ""
    knows_tools = BEGIN in template
    if not knows_tools:
        messages = _one_system([*([] if tools is None else [_told(tools)]), *_without_calls(messages)])
    try:
        if not tokenizer.templates.sources:
            return Prompt(tokenizer.encode("\n".join(message["content"] for message in messages)))
        given = [tool.given for tool in tools.tools] if tools is not None and knows_tools else None
        text = tokenizer.templates.render(messages, tools=given, **variables)
        return Prompt(tokenizer.encode_bare(text), THOUGHT in template, text.rstrip().endswith(THINK))
    except (ValueError, TypeError) as exc:
        raise ApiError(400, str(exc), param="messages", code="invalid_value") from exc


def _told(tools: Tools) -> Message:
    return {"role": "system", "content": tools.words}


def _without_calls(messages: Sequence[Message]) -> list[Message]:
    """For templates that know no tools: calls and their results as text, in Hermes' form."""
    found: list[Message] = []
    for message in messages:
        content = message["content"]
        for call in message.get("tool_calls", ()):
            function = {"name": call["function"]["name"], "arguments": call["function"]["arguments"]}
            content += f"\n{BEGIN}\n{json.dumps(function)}\n</tool_call>"
        role = message["role"]
        if role == "tool":
            role, content = "user", f"<tool_response>\n{content}\n</tool_response>"
        found.append({"role": role, "content": content.removeprefix("\n")})
    return found


def _one_system(messages: list[Message]) -> list[Message]:
    """The system messages at the start as one, which is the most that many templates take."""
    first = next((i for i, message in enumerate(messages) if message["role"] != "system"), len(messages))
    if first < 2:
        return messages
    content = "\n\n".join(message["content"] for message in messages[:first])
    return [{"role": "system", "content": content}, *messages[first:]]
