"""What a chat answer consists of: thoughts, text and calls of functions, told apart while it is written."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass

from hostring.integrations.llm.serve.http.tools import BEGIN, END
from hostring.integrations.llm.serve.stops import overlap

THINK, THOUGHT = "<think>", "</think>"
CONTENT, REASONING, CALL, ARGUMENTS = "content", "reasoning", "call", "arguments"
_HEAD = re.compile(r'\s*\{"name": ("(?:[^"\\]|\\.)*"), "arguments": ')


@dataclass(frozen=True)
class Part:
    """Text of one kind. Of a CALL it is the function's name; its ARGUMENTS follow."""

    kind: str
    text: str


class AnswerParts:
    """Pieces of text in, parts out.

    Args:
        may_think: the answer may begin with thoughts. thinks: it begins in the middle of them.
        calls: it may call functions.
    """

    def __init__(self, may_think: bool = False, thinks: bool = False, calls: bool = False) -> None:
        self._text = ""
        self._state = REASONING if thinks else CONTENT
        self._may_think, self._calls = may_think and not thinks, calls
        self._skips_space = may_think or thinks

    def push(self, text: str) -> list[Part]:
        """What is certain now."""
        self._text += text
        parts: list[Part] = []
        while self._step(parts):
            pass
        return [part for part in parts if part.text]

    def finish(self) -> list[Part]:
        """What was held back, once no more text comes. A call that has only begun is text."""
        parts = self.push("")
        text = (BEGIN if self._state == CALL else "") + self._text
        kind = CONTENT if self._state == CALL else self._state
        self._text = ""
        return [*parts, Part(kind, text)] if text.strip() or (text and not self._skips_space) else parts

    def _step(self, parts: list[Part]) -> bool:
        """One step through the text. Returns whether another may follow."""
        if self._state == CALL:
            return self._head(parts)
        if self._state == CONTENT and self._skips_space:
            self._text = self._text.lstrip()
            if not self._text:
                return False
        if self._may_think:
            return self._thinks()
        mark = {REASONING: THOUGHT, ARGUMENTS: END, CONTENT: BEGIN if self._calls else ""}[self._state]
        text, found, rest = self._text.partition(mark) if mark else (self._text, "", "")
        if not found:
            kept = overlap(text, mark)
            text, self._text = text[: len(text) - kept], text[len(text) - kept :]
            if text:
                self._skips_space = False
            parts.append(Part(self._state, text))
            return False
        parts.append(Part(self._state, text))
        self._state, self._text = CALL if self._state == CONTENT else CONTENT, rest
        self._skips_space = True
        return True

    def _thinks(self) -> bool:
        """Whether the answer begins with thoughts is known now, or not yet."""
        if THINK.startswith(self._text) and len(self._text) < len(THINK):
            return False
        self._may_think = False
        if self._text.startswith(THINK):
            self._state, self._text = REASONING, self._text.removeprefix(THINK)
        return True

    def _head(self, parts: list[Part]) -> bool:
        found = _HEAD.match(self._text)
        if found is None:
            return False
        parts.append(Part(CALL, json.loads(found[1])))
        self._state, self._text = ARGUMENTS, self._text[found.end() :]
        return True
