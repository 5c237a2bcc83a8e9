"""Functions that a model may call: the fields `tools` and `tool_choice`, the grammar of calls, and what the model is
told."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from hostring.integrations.llm.serve.guides import with_spaces
from hostring.integrations.llm.serve.http.errors import invalid
from hostring.integrations.llm.serve.http.fields import BodyFields

BEGIN, END = "<tool_call>", "}\n</tool_call>"  # as Hermes and Qwen models write calls
MAX_TOOLS = 128
_TEXT = r"/(.|\n)*/"


@dataclass(frozen=True)
class Tool:
    """A function. `given`: what the client sent, for the template."""

    name: str
    parameters: dict[str, Any]
    given: dict[str, Any]


@dataclass(frozen=True)
class Tools:
    """What may be called. `required`: at least one call, and no text. `parallel`: more than one call."""

    tools: tuple[Tool, ...]
    required: bool
    parallel: bool

    @property
    def grammar(self) -> str:
        """Of an answer, in llguidance's form: text in which each call is whole and has the arguments that its schema
        allows."""
        begin = "" if self.required else BEGIN
        rules = ["%llguidance {}"]
        names = [f"call_{i}" for i in range(len(self.tools))]
        one = f"({' | '.join(names)})"
        if self.required:
            rules.append(f'start: {one} ("\\n" {one})*' if self.parallel else f"start: {one}")
        else:
            rules += [
                f"start: {one}* rest" if self.parallel else f"start: {one} | rest",
                "rest: TEXT",
                f"TEXT: {_TEXT}",
                f"begin[lazy]: TEXT {json.dumps(BEGIN)}",
            ]
        for name, tool in zip(names, self.tools, strict=True):
            head = f'{BEGIN}\n{{"name": {json.dumps(tool.name)}, "arguments": '
            head = head.removeprefix(begin)
            arguments = json.dumps(with_spaces(tool.parameters))
            rules.append(f"{name}: {'begin ' if begin else ''}{json.dumps(head)} %json {arguments} {json.dumps(END)}")
        return "\n".join(rules) + "\n"

    @property
    def words(self) -> str:
        """What a model is told whose template has no words for tools."""
        signatures = "\n".join(json.dumps(tool.given) for tool in self.tools)
        return (
            "# Tools\n\nYou may call one or more functions to assist with the user query.\n\nYou are provided with "
            f"function signatures within <tools></tools> XML tags:\n<tools>\n{signatures}\n</tools>\n\nFor each "
            "function call, return a json object with function name and arguments within <tool_call></tool_call> XML "
            "tags:\n"
            '<tool_call>\n{"name": <function-name>, "arguments": <args-json-object>}\n</tool_call>'
        )


def read_tools(fields: BodyFields) -> Tools | None:
    """What may be called; None where nothing may.

    Raises:
        ApiError: a field is wrong.
    """
    found, choice = fields.get("tools"), fields.get("tool_choice")
    parallel = fields.flag("parallel_tool_calls") if "parallel_tool_calls" in fields else True
    if found is None:
        if choice not in (None, "none", "auto"):
            raise invalid("tool_choice", "'tool_choice' is only allowed when 'tools' are specified.")
        return None
    if not isinstance(found, list) or not 0 < len(found) <= MAX_TOOLS:
        raise fields.wrong("tools", f"a list of 1 to {MAX_TOOLS} functions")
    tools = [_tool(tool, f"tools[{i}]") for i, tool in enumerate(found)]
    if len({tool.name for tool in tools}) < len(tools):
        raise invalid("tools", "two functions of 'tools' have the same name")
    if choice == "none":
        return None
    if choice in (None, "auto", "required"):
        return Tools(tuple(tools), choice == "required", parallel)
    return Tools(_named(choice, tools), True, False)


def _named(choice: Any, tools: Sequence[Tool]) -> tuple[Tool, ...]:
    function = choice.get("function") if isinstance(choice, dict) and choice.get("type") == "function" else None
    name = function.get("name") if isinstance(function, dict) else None
    named = tuple(tool for tool in tools if tool.name == name)
    if not named:
        raise invalid(
            "tool_choice", "'tool_choice' is neither 'none', 'auto' nor 'required', nor the name of one of the 'tools'"
        )
    return named


def _tool(found: Any, where: str) -> Tool:
    function = found.get("function") if isinstance(found, dict) and found.get("type") == "function" else None
    if not isinstance(function, dict):
        raise invalid(where, f"{where} is no function: expected {{'type': 'function', 'function': {{...}}}}")
    name, parameters = function.get("name"), function.get("parameters")
    if not isinstance(name, str) or not re.fullmatch(r"[A-Za-z0-9_.-]{1,64}", name):
        raise invalid(f"{where}.function.name", f"{where}.function.name is no name of letters, digits, _ and -")
    if parameters is not None and not isinstance(parameters, dict):
        raise invalid(f"{where}.function.parameters", f"{where}.function.parameters is no JSON schema", "invalid_type")
    return Tool(name, parameters or {"type": "object"}, found)
