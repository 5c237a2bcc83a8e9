"""`/v1/chat/completions`: messages in, an answer of the assistant out."""

from __future__ import annotations

import secrets
from time import time
from typing import Any

from hostring.integrations.llm.serve.http.answers import Answers
from hostring.integrations.llm.serve.http.errors import invalid
from hostring.integrations.llm.serve.http.fields import BodyFields
from hostring.integrations.llm.serve.http.messages import prompt_of, read_messages
from hostring.integrations.llm.serve.http.replies import Reply
from hostring.integrations.llm.serve.http.sampling_fields import (
    MAX_TOP_LOGPROBS,
    SHARED,
    make_requests,
    read_shared,
)
from hostring.integrations.llm.serve.http.service import Service
from hostring.integrations.llm.serve.http.token_texts import TokenTexts
from hostring.integrations.llm.serve.http.usage import Usage
from hostring.integrations.llm.serve.text_request import Ended, Event, Piece, TokenLogprob

_IGNORED = frozenset(
    {
        "store", "metadata", "service_tier", "safety_identifier", "prompt_cache_key", "prompt_cache_retention",
        "verbosity", "reasoning_effort", "parallel_tool_calls",
    }
)  # fmt: skip
_KNOWN = SHARED | _IGNORED | {"messages", "logprobs", "top_logprobs", "max_completion_tokens", "chat_template_kwargs"}
_KNOWN |= {"response_format", "tools", "tool_choice", "modalities"}
_UNSUPPORTED = {
    "audio": "this server writes text only",
    "functions": "use 'tools'",
    "function_call": "use 'tool_choice'",
    "prediction": "predicted outputs are not used here",
    "web_search_options": "this server reaches no other host",
    "moderation": "this server has no moderation",
}


def chat_reply(body: dict[str, Any], service: Service) -> Reply:
    """Start to answer a request.

    Raises:
        ApiError: it is wrong, or can't be answered now.
    """
    fields = BodyFields(body)
    fields.only(_KNOWN, _UNSUPPORTED)
    shared = read_shared(fields, service)
    messages = read_messages(fields)
    ids = prompt_of(messages, service, fields.object("chat_template_kwargs") or {})
    limit = fields.whole("max_completion_tokens", 1)
    limit = fields.whole("max_tokens", 1) if limit is None else limit
    requests = make_requests(shared, service, ids, limit, top_logprobs=_top_logprobs(fields))
    form = ChatForm(service.options.model_name, service.texts, shared.n, requests[0].top_logprobs is not None)
    answers = Answers(service.scheduler, requests)
    return Reply(answers, form, Usage([len(ids)], shared.n), shared.stream, shared.include_usage, range(shared.n))


def _top_logprobs(fields: BodyFields) -> int | None:
    """How many are wanted beside each token; None where no probabilities are."""
    wanted, top = fields.flag("logprobs"), fields.whole("top_logprobs", 0, MAX_TOP_LOGPROBS)
    if top is not None and not wanted:
        raise invalid("top_logprobs", "'top_logprobs' is only allowed when 'logprobs' is true")
    return (top or 0) if wanted else None


class ChatForm:
    """How chat completions are written down.

    Args:
        n: texts. logprobs: they have probabilities.
    """

    def __init__(self, model: str, texts: TokenTexts, n: int, logprobs: bool) -> None:
        self._texts, self._logprobs = texts, logprobs
        self._common = {"id": f"chatcmpl-{secrets.token_hex(12)}", "created": int(time()), "model": model}
        self._content = [""] * n
        self._probabilities: list[list[dict[str, Any]]] = [[] for _ in range(n)]
        self._reasons: list[str | None] = [None] * n

    def opening(self, index: int) -> list[dict[str, Any]]:
        """See `Form`."""
        return [self._choice(index, {"role": "assistant", "content": ""})]

    def chunks(self, index: int, event: Event) -> list[dict[str, Any]]:
        """See `Form`."""
        if isinstance(event, Piece):
            self._content[index] += event.text
            found = [_probability(self._texts, one) for one in event.logprobs]
            self._probabilities[index] += found
            return [self._choice(index, {"content": event.text}, found if self._logprobs else None)]
        if isinstance(event, Ended):
            self._reasons[index] = event.reason
            return [self._choice(index, {}, reason=event.reason)]
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
        for index, (content, found, reason) in enumerate(
            zip(self._content, self._probabilities, self._reasons, strict=True)
        ):
            message = {"role": "assistant", "content": content, "refusal": None}
            logprobs = {"content": found, "refusal": None} if self._logprobs else None
            choices.append({"index": index, "message": message, "logprobs": logprobs, "finish_reason": reason})
        return {**self._common, "object": "chat.completion", "choices": choices}


def _probability(texts: TokenTexts, found: TokenLogprob) -> dict[str, Any]:
    top = [_one(texts, token, logprob) for token, logprob in found.top]
    return {**_one(texts, found.token, found.logprob), "top_logprobs": top}


def _one(texts: TokenTexts, token: int, logprob: float) -> dict[str, Any]:
    lowest = -9999.0  # JSON has no infinity; OpenAI writes this number
    return {"token": texts.text(token), "logprob": max(logprob, lowest), "bytes": list(texts.bytes(token))}
