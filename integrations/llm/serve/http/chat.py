"""`/v1/chat/completions`: messages in, an answer of the assistant out."""

from __future__ import annotations

import asyncio
import secrets
from dataclasses import dataclass, field
from time import time
from typing import Any

from hostring.integrations.llm.serve.guides import Guide
from hostring.integrations.llm.serve.http.answer_parts import CALL, CONTENT, REASONING, AnswerParts, Part
from hostring.integrations.llm.serve.http.answers import Answers
from hostring.integrations.llm.serve.http.errors import invalid
from hostring.integrations.llm.serve.http.fields import BodyFields
from hostring.integrations.llm.serve.http.messages import prompt_of, read_messages
from hostring.integrations.llm.serve.http.replies import Reply
from hostring.integrations.llm.serve.http.response_format import format_grammar
from hostring.integrations.llm.serve.http.sampling_fields import (
    MAX_TOP_LOGPROBS,
    SHARED,
    make_requests,
    read_shared,
)
from hostring.integrations.llm.serve.http.service import Service
from hostring.integrations.llm.serve.http.token_texts import TokenTexts
from hostring.integrations.llm.serve.http.tools import read_tools
from hostring.integrations.llm.serve.http.usage import Usage
from hostring.integrations.llm.serve.text_request import STOP, Ended, Event, Piece, TokenLogprob

_IGNORED = frozenset(
    {
        "store", "metadata", "service_tier", "safety_identifier", "prompt_cache_key", "prompt_cache_retention",
        "verbosity", "reasoning_effort",
    }
)  # fmt: skip
_KNOWN = SHARED | _IGNORED | {"messages", "logprobs", "top_logprobs", "max_completion_tokens", "chat_template_kwargs"}
_KNOWN |= {"response_format", "tools", "tool_choice", "parallel_tool_calls", "modalities"}
TOOL_CALLS = "tool_calls"
_UNSUPPORTED = {
    "audio": "this server writes text only",
    "functions": "use 'tools'",
    "function_call": "use 'tool_choice'",
    "prediction": "predicted outputs are not used here",
    "web_search_options": "this server reaches no other host",
    "moderation": "this server has no moderation",
}


async def chat_reply(body: dict[str, Any], service: Service) -> Reply:
    """Start to answer a request.

    Raises:
        ApiError: it is wrong, or can't be answered now.
    """
    fields = BodyFields(body)
    fields.only(_KNOWN, _UNSUPPORTED)
    shared = read_shared(fields, service)
    messages, tools, grammar = read_messages(fields), read_tools(fields), format_grammar(fields)
    prompt = prompt_of(messages, service, fields.object("chat_template_kwargs") or {}, tools)
    limit = fields.whole("max_completion_tokens", 1)
    limit = fields.whole("max_tokens", 1) if limit is None else limit
    top = _top_logprobs(fields)
    param = "response_format" if tools is None else "tools"
    guide = await _guide(service, grammar if tools is None else tools.grammar, param)
    requests = make_requests(shared, service, prompt.ids, limit, top_logprobs=top, guide=guide)
    parts = [AnswerParts(prompt.may_think, prompt.thinks, tools is not None) for _ in requests]
    form = ChatForm(service.options.model_name, service.texts, parts, top is not None)
    usage = Usage([len(prompt.ids)], shared.n)
    answers = Answers(service.scheduler, requests)
    return Reply(answers, form, usage, shared.stream, shared.include_usage, range(shared.n))


async def _guide(service: Service, grammar: str | None, param: str) -> Guide | None:
    """For the texts of one request, made beside the thread that answers others."""
    if grammar is None:
        return None
    try:
        return await asyncio.to_thread(service.guides.of, grammar)
    except ValueError as exc:
        raise invalid(param, f"Invalid schema for {param!r}: {exc}", "invalid_json_schema") from exc


def _top_logprobs(fields: BodyFields) -> int | None:
    """How many are wanted beside each token; None where no probabilities are."""
    wanted, top = fields.flag("logprobs"), fields.whole("top_logprobs", 0, MAX_TOP_LOGPROBS)
    if top is not None and not wanted:
        raise invalid("top_logprobs", "'top_logprobs' is only allowed when 'logprobs' is true")
    return (top or 0) if wanted else None


@dataclass
class _Message:
    """One answer as far as it has come. `calls`: of functions, as OpenAI's API writes them."""

    parts: AnswerParts
    content: str = ""
    reasoning: str = ""
    calls: list[dict[str, Any]] = field(default_factory=list)
    probabilities: list[dict[str, Any]] = field(default_factory=list)
    reason: str | None = None

    def add(self, part: Part) -> dict[str, Any]:
        """Take a part. Returns what a stream tells of it."""
        if part.kind == CONTENT:
            self.content += part.text
            return {"content": part.text}
        if part.kind == REASONING:
            self.reasoning += part.text
            return {"reasoning_content": part.text}
        if part.kind == CALL:
            function = {"name": part.text, "arguments": ""}
            self.calls.append({"id": f"call_{secrets.token_hex(12)}", "type": "function", "function": function})
            return {"tool_calls": [{"index": len(self.calls) - 1, **self.calls[-1], "function": dict(function)}]}
        self.calls[-1]["function"]["arguments"] += part.text
        return {"tool_calls": [{"index": len(self.calls) - 1, "function": {"arguments": part.text}}]}

    def whole(self) -> dict[str, Any]:
        """The message, once it is complete."""
        message = {"role": "assistant", "content": self.content or (None if self.calls else ""), "refusal": None}
        if self.reasoning:
            message["reasoning_content"] = self.reasoning
        return {**message, "tool_calls": self.calls} if self.calls else message


class ChatForm:
    """How chat completions are written down.

    Args:
        parts: for each text, what tells its parts apart. logprobs: they have probabilities.
    """

    def __init__(self, model: str, texts: TokenTexts, parts: list[AnswerParts], logprobs: bool) -> None:
        self._texts, self._logprobs = texts, logprobs
        self._common = {"id": f"chatcmpl-{secrets.token_hex(12)}", "created": int(time()), "model": model}
        self._messages = [_Message(one) for one in parts]

    def opening(self, index: int) -> list[dict[str, Any]]:
        """See `Form`."""
        return [self._choice(index, {"role": "assistant", "content": ""})]

    def chunks(self, index: int, event: Event) -> list[dict[str, Any]]:
        """See `Form`."""
        message = self._messages[index]
        if isinstance(event, Piece):
            found = [_probability(self._texts, one) for one in event.logprobs]
            message.probabilities += found
            deltas = [message.add(part) for part in message.parts.push(event.text)]
            if found and not deltas:
                deltas = [{}]
            return [
                self._choice(index, delta, (found if i == 0 else []) if self._logprobs else None)
                for i, delta in enumerate(deltas)
            ]
        if isinstance(event, Ended):
            deltas = [message.add(part) for part in message.parts.finish()]
            message.reason = TOOL_CALLS if message.calls and event.reason == STOP else event.reason
            return [*(self._choice(index, one) for one in deltas), self._choice(index, {}, reason=message.reason)]
        return []

    def _choice(
        self,
        index: int,
        delta: dict[str, Any],
        probabilities: list[dict[str, Any]] | None = None,
        reason: str | None = None,
    ) -> dict[str, Any]:
        logprobs = None if probabilities is None else {"content": probabilities, "refusal": None}
        return {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": reason}

    def chunk(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        """See `Form`."""
        return {**self._common, "object": "chat.completion.chunk", "choices": choices}

    def whole(self) -> dict[str, Any]:
        """See `Form`."""
        choices = []
        for index, message in enumerate(self._messages):
            logprobs = {"content": message.probabilities, "refusal": None} if self._logprobs else None
            told = {"message": message.whole(), "logprobs": logprobs, "finish_reason": message.reason}
            choices.append({"index": index, **told})
        return {**self._common, "object": "chat.completion", "choices": choices}


def _probability(texts: TokenTexts, found: TokenLogprob) -> dict[str, Any]:
    top = [_one(texts, token, logprob) for token, logprob in found.top]
    return {**_one(texts, found.token, found.logprob), "top_logprobs": top}


def _one(texts: TokenTexts, token: int, logprob: float) -> dict[str, Any]:
    lowest = -9999.0  # JSON has no infinity; OpenAI writes this number
    return {"token": texts.text(token), "logprob": max(logprob, lowest), "bytes": list(texts.bytes(token))}
