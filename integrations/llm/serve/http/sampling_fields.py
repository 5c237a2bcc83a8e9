"""The fields that chat and plain completions share: how to choose tokens, and when to end."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass

from hostring.integrations.llm.model.sampling import Sampling
from hostring.integrations.llm.serve.guides import Guide
from hostring.integrations.llm.serve.http.errors import ApiError, invalid
from hostring.integrations.llm.serve.http.fields import BodyFields
from hostring.integrations.llm.serve.http.service import Service
from hostring.integrations.llm.serve.text_request import TextRequest

MAX_CHOICES = 128
MAX_STOPS = 4
MAX_TOP_LOGPROBS = 20
SHARED = frozenset(
    {
        "model", "stream", "stream_options", "n", "max_tokens", "temperature", "top_p", "top_k", "seed", "stop",
        "logit_bias", "frequency_penalty", "presence_penalty", "ignore_eos", "user",
    }
)  # fmt: skip
"""Names of fields that both kinds of completions have; `top_k` and `ignore_eos` are this server's own."""


@dataclass(frozen=True)
class SharedFields:
    """What both kinds of completions say beside their prompt.

    Attributes:
        n: texts per prompt.
        stream, include_usage: as events; with a last one that counts tokens.
    """

    n: int
    stream: bool
    include_usage: bool
    sampling: Sampling
    stop: tuple[str, ...]
    logit_bias: dict[int, float]
    frequency_penalty: float
    presence_penalty: float
    ignore_eos: bool


def read_shared(fields: BodyFields, service: Service) -> SharedFields:
    """Read the fields that both kinds have.

    Raises:
        ApiError: one of them is wrong, or the model is another one.
    """
    model = fields.text("model")
    if model is not None and model != service.options.model_name:
        raise ApiError(
            404,
            f"The model {model!r} does not exist; this server has {service.options.model_name!r}",
            param="model",
            code="model_not_found",
        )
    stream = fields.flag("stream")
    seed = fields.whole("seed", -(2**63))
    return SharedFields(
        n=fields.whole("n", 1, MAX_CHOICES) or 1,
        stream=stream,
        include_usage=_include_usage(fields, stream),
        sampling=Sampling(
            fields.number("temperature", 1.0, 0.0, 2.0),
            fields.whole("top_k", 0) or 0,
            fields.number("top_p", 1.0, 0.0, 1.0) or 1e-9,  # 0 leaves the most likely token
            secrets.randbits(32) if seed is None else seed % 2**63,
        ),
        stop=_stops(fields),
        logit_bias=_logit_bias(fields, service.vocab_size),
        frequency_penalty=fields.number("frequency_penalty", 0.0, -2.0, 2.0),
        presence_penalty=fields.number("presence_penalty", 0.0, -2.0, 2.0),
        ignore_eos=fields.flag("ignore_eos"),
    )


def make_requests(
    shared: SharedFields,
    service: Service,
    ids: Sequence[int],
    max_tokens: int | None,
    *,
    top_logprobs: int | None = None,
    prompt_logprobs: bool = False,
    guide: Guide | None = None,
    param: str = "messages",
) -> list[TextRequest]:
    """The texts that are wanted for one prompt, each with a seed of its own.

    Args:
        max_tokens: as many as the context holds when None. param: the field that the prompt came from.

    Raises:
        ApiError: the prompt is empty or does not fit the context.
    """
    context = service.scheduler.max_seq
    if not ids:
        raise invalid(param, "the prompt has no tokens; give some text", "empty_prompt")
    if len(ids) > context:
        raise invalid(
            param,
            f"This model's maximum context length is {context} tokens. However, your {param} resulted in {len(ids)} "
            f"tokens. Please reduce the length of the {param}.",
            "context_length_exceeded",
        )
    room = context - len(ids) + 1
    sampling = shared.sampling
    return [
        TextRequest(
            ids=tuple(ids),
            max_tokens=room if max_tokens is None else min(max_tokens, room),
            sampling=Sampling(sampling.temperature, sampling.top_k, sampling.top_p, (sampling.seed + i) % 2**63),
            stop=shared.stop,
            logit_bias=shared.logit_bias,
            frequency_penalty=shared.frequency_penalty,
            presence_penalty=shared.presence_penalty,
            top_logprobs=top_logprobs,
            prompt_logprobs=prompt_logprobs,
            ignore_eos=shared.ignore_eos,
            guide=guide.another() if guide is not None else None,
        )
        for i in range(shared.n)
    ]


def _include_usage(fields: BodyFields, stream: bool) -> bool:
    options = fields.object("stream_options")
    if options is None:
        return False
    if not stream:
        raise invalid("stream_options", "The 'stream_options' parameter is only allowed when 'stream' is enabled.")
    inner = BodyFields(options, "stream_options")
    inner.only({"include_usage", "include_obfuscation"}, {})
    return inner.flag("include_usage")


def _stops(fields: BodyFields) -> tuple[str, ...]:
    found = fields.get("stop")
    stops = [found] if isinstance(found, str) else [] if found is None else found
    if not isinstance(stops, list) or not all(isinstance(stop, str) for stop in stops):
        raise fields.wrong("stop", "a string or a list of strings")
    if len(stops) > MAX_STOPS:
        raise invalid(
            "stop", f"'stop' has {len(stops)} texts; at most {MAX_STOPS} are possible", "array_above_max_length"
        )
    if "" in stops and isinstance(found, list):
        raise invalid("stop", "'stop' holds an empty text, which would end every answer at once")
    return tuple(stop for stop in stops if stop)


def _logit_bias(fields: BodyFields, vocab_size: int) -> dict[int, float]:
    found = fields.object("logit_bias") or {}
    values = BodyFields(found, "logit_bias")
    bias = {}
    for key in found:
        if not (key.isascii() and key.isdigit() and len(key) < 10 and int(key) < vocab_size):
            raise invalid("logit_bias", f"'logit_bias' has {key!r}; expected ids of tokens, 0 to {vocab_size - 1}")
        bias[int(key)] = values.number(key, 0.0, -100.0, 100.0)
    return bias
