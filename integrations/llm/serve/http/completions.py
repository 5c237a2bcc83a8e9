"""`/v1/completions`: a text in, its continuation out."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass, field
from time import time
from typing import Any

from hostring.integrations.llm.serve.http.answers import Answers
from hostring.integrations.llm.serve.http.errors import ApiError, invalid
from hostring.integrations.llm.serve.http.fields import BodyFields
from hostring.integrations.llm.serve.http.replies import Reply
from hostring.integrations.llm.serve.http.sampling_fields import MAX_CHOICES, SHARED, make_requests, read_shared
from hostring.integrations.llm.serve.http.service import Service
from hostring.integrations.llm.serve.http.token_texts import TokenTexts
from hostring.integrations.llm.serve.http.usage import Usage
from hostring.integrations.llm.serve.text_request import Ended, Event, Piece, PromptLogprobs, TextRequest, TokenLogprob

DEFAULT_MAX_TOKENS = 16  # as in OpenAI's API
MAX_LOGPROBS = 20
_KNOWN = SHARED | {"prompt", "echo", "logprobs", "best_of"}
_UNSUPPORTED = {"suffix": "this server writes what comes after a text only"}


async def completion_reply(body: dict[str, Any], service: Service) -> Reply:
    """Start to answer a request.

    Raises:
        ApiError: it is wrong, or can't be answered now.
    """
    fields = BodyFields(body)
    fields.only(_KNOWN, _UNSUPPORTED)
    shared = read_shared(fields, service)
    prompts = _prompts(fields, service)
    echo, top = fields.flag("echo"), fields.whole("logprobs", 0, MAX_LOGPROBS)
    limit = fields.whole("max_tokens", 0)
    limit = DEFAULT_MAX_TOKENS if limit is None else limit
    if limit == 0 and not echo:
        raise invalid("max_tokens", "'max_tokens' is 0, so there would be no text; ask for at least 1, or set 'echo'")
    best_of = fields.whole("best_of", 1)
    if best_of not in (None, shared.n):
        raise invalid("best_of", f"'best_of' is {best_of}; this server writes as many texts as it returns, 'n'")
    if len(prompts) * shared.n > MAX_CHOICES:
        raise invalid("n", f"{len(prompts)} prompts with n={shared.n} are too many texts; at most {MAX_CHOICES}")
    wanted = echo and (top is not None or limit == 0)
    requests: list[TextRequest] = []
    for ids in prompts:
        requests += make_requests(shared, service, ids, limit, top_logprobs=top, prompt_logprobs=wanted, param="prompt")
    form = CompletionForm(service, [list(one.ids) for one in requests] if echo else None, len(requests), top)
    usage = Usage([len(ids) for ids in prompts], shared.n)
    answers = Answers(service.scheduler, requests)
    return Reply(answers, form, usage, shared.stream, shared.include_usage, range(len(requests)))


def _prompts(fields: BodyFields, service: Service) -> list[list[int]]:
    """Ids of each prompt, of the forms that it has: a text, ids, or a list of either."""
    found = fields.get("prompt")
    if found is None:
        raise invalid("prompt", "Missing required parameter: 'prompt'.", "missing_required_parameter")
    if isinstance(found, str) or (isinstance(found, list) and found and _is_id(found[0])):
        found = [found]
    if not isinstance(found, list) or not found:
        raise fields.wrong("prompt", "a string, a list of ids, or a list of either")
    return [_ids(prompt, service) for prompt in found]


def _is_id(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _ids(prompt: Any, service: Service) -> list[int]:
    if isinstance(prompt, str):
        try:
            return service.tokenizer.encode(prompt)
        except ValueError as exc:
            raise ApiError(400, str(exc), param="prompt", code="invalid_value") from exc
    if not isinstance(prompt, list) or not all(_is_id(i) for i in prompt):
        raise invalid("prompt", "'prompt' holds something that is neither a string nor a list of ids", "invalid_type")
    for i in prompt:
        if not 0 <= i < service.vocab_size:
            raise invalid("prompt", f"id {i} is outside the vocabulary; ids are 0 to {service.vocab_size - 1}")
    return prompt


@dataclass
class _Text:
    """One text as far as it has come. `offset`: characters before the next token."""

    text: str = ""
    reason: str | None = None
    offset: int = 0
    logprobs: dict[str, list[Any]] = field(default_factory=lambda: _no_logprobs())


def _no_logprobs() -> dict[str, list[Any]]:
    return {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}


class CompletionForm:
    """How plain completions are written down.

    Args:
        echo: the prompts of all texts, where they are part of the answer.
        top: how many of the most likely tokens stand beside each; None where no probabilities are wanted.
    """

    def __init__(self, service: Service, echo: Sequence[list[int]] | None, n: int, top: int | None) -> None:
        self._texts: TokenTexts = service.texts
        self._tokenizer, self._echo, self._top = service.tokenizer, echo, top
        self._common = {
            "id": f"cmpl-{secrets.token_hex(12)}",
            "object": "text_completion",
            "created": int(time()),
            "model": service.options.model_name,
        }
        self._found = [_Text() for _ in range(n)]

    def opening(self, index: int) -> list[dict[str, Any]]:
        """See `Form`. The prompt of an echo waits for its probabilities, where they are wanted."""
        if self._echo is None or self._top is not None:
            return []
        return [self._add(index, self._tokenizer.decode(self._echo[index]), [])]

    def chunks(self, index: int, event: Event) -> list[dict[str, Any]]:
        """See `Form`."""
        if isinstance(event, PromptLogprobs) and self._echo is not None and self._top is not None:
            ids = self._echo[index]
            first = TokenLogprob(ids[0], float("nan"))
            return [self._add(index, self._tokenizer.decode(ids), [first, *event.logprobs])]
        if isinstance(event, Piece):
            return [self._add(index, event.text, event.logprobs)]
        if isinstance(event, Ended):
            self._found[index].reason = event.reason
            return [self._choice(index, "", None, event.reason)]
        return []

    def _add(self, index: int, text: str, logprobs: Sequence[TokenLogprob]) -> dict[str, Any]:
        found = self._found[index]
        found.text += text
        new = _no_logprobs()
        for one in logprobs:
            token = self._texts.text(one.token)
            first = one.logprob != one.logprob
            new["tokens"].append(token)
            new["token_logprobs"].append(None if first else one.logprob)
            new["top_logprobs"].append(None if first else {self._texts.text(i): value for i, value in one.top})
            new["text_offset"].append(found.offset)
            found.offset += len(token)
        for name, values in new.items():
            found.logprobs[name] += values
        return self._choice(index, text, new if self._top is not None else None, None)

    def _choice(self, index: int, text: str, logprobs: Any, reason: str | None) -> dict[str, Any]:
        return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": reason}

    def chunk(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        """See `Form`."""
        return {**self._common, "choices": choices}

    def whole(self) -> dict[str, Any]:
        """See `Form`."""
        if self._echo is not None and self._top is None:
            for index, found in enumerate(self._found):
                found.text = self._tokenizer.decode(self._echo[index]) + found.text
        choices = [
            self._choice(index, found.text, found.logprobs if self._top is not None else None, found.reason)
            for index, found in enumerate(self._found)
        ]
        return {**self._common, "choices": choices}
