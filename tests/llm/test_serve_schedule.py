"""The scheduler, with a model that is a sum: texts are right whatever happens to others, to slots, and to the group."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from hostring import PeerLostError
from hostring.integrations.llm.checkpoint.tokenizer import load_tokenizer
from hostring.integrations.llm.demo.job import BUNDLED, Job
from hostring.integrations.llm.serve.head import Cluster, Head
from hostring.integrations.llm.serve.options import ServeOptions
from hostring.integrations.llm.serve.scheduler import Scheduler
from hostring.integrations.llm.serve.steps import FROM_PROMPT, Admission, Brought, Plan
from hostring.integrations.llm.serve.text_request import TextRequest

STREAMS, CONTEXT, VOCAB = 3, 480, 500


def next_token(ids: Sequence[int]) -> int:
    return sum((n + 1) * token for n, token in enumerate(ids)) % VOCAB


def text_of(prompt: Sequence[int], count: int) -> list[int]:
    ids = list(prompt)
    for _ in range(count):
        ids.append(next_token(ids))
    return ids[len(prompt) :]


class Ranks:
    """What all ranks do with the head's plans: caches by slot, and steps that come back `groups` decisions later."""

    def __init__(self, groups: int) -> None:
        self._caches: dict[int, list[int]] = {}
        self._prompts: dict[int, list[int]] = {}
        self._under_way: deque[list[tuple[int, int]]] = deque([[]] * groups)

    def brought(self) -> tuple[Any, list[Brought]]:
        """Candidates of the oldest step."""
        found = self._under_way.popleft()
        numbers = [n for _, token in found for n in (int(np.float32(1.0).view(np.int32)), token)]
        return np.array([[*numbers, 0]], np.int32), [Brought(slot, 2 * n, 1) for n, (slot, _) in enumerate(found)]

    def take(self, plan: Plan, admissions: list[Admission]) -> None:
        for admission in admissions:
            cache = self._caches.setdefault(admission.slot, [])
            assert len(cache) >= admission.keep
            del cache[admission.keep :]
            self._prompts[admission.slot] = list(admission.ids)
        step = []
        assert len({row.slot for row in plan.rows}) == len(plan.rows)
        for row in plan.rows:
            cache, prompt = self._caches[row.slot], self._prompts[row.slot]
            cache += prompt[: row.positions] if row.token == FROM_PROMPT else [row.token]
            if row.token == FROM_PROMPT:
                del prompt[: row.positions]
            if not prompt:
                step.append((row.slot, next_token(cache)))
        self._under_way.append(step)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("groups", [1, 2, 3])
def test_texts_are_right_whatever_happens(groups: int, seed: int) -> None:
    """Texts come and are cancelled, and the group fails; broken texts are replayed."""
    chance = random.Random(seed)
    job = Job(str(BUNDLED), ("float32",), (), 1, 0.0, 0, 1.0, 0, False)
    options = ServeOptions(job, streams=STREAMS, queue=100, replay=True)
    head = Scheduler(options, load_tokenizer(BUNDLED), VOCAB, CONTEXT, groups)
    head.set_state("")
    ranks, texts, failures = Ranks(groups), [], list[Any]()
    begun = [chance.randrange(VOCAB) for _ in range(200)]  # what prompts have in common
    for decision in range(1500):
        if chance.random() < 0.1 and len(texts) < 40:
            ids = (
                *begun[: chance.choice([0, 5, 150])],
                *(chance.randrange(VOCAB) for _ in range(chance.choice([1, 9]))),
            )
            request = TextRequest(ids, chance.choice([1, 4, 30]), ignore_eos=True)
            texts += head.submit([request], [lambda event: None])
        if chance.random() < 0.02 and texts:
            head.cancel(chance.choice(texts))
        if chance.random() < 0.01:
            head.broken("a rank is lost")
            ranks = Ranks(groups)
            failures.append(decision)
            head.set_state("")
        ranks.take(head.decide(*ranks.brought()), head.admissions())
    assert len(texts) == 40
    assert failures
    assert head.in_flight == (0, 0)
    assert sum(len(text.tokens) == text.request.max_tokens for text in texts) > 20
    for text in texts:
        assert text.tokens == text_of(text.request.ids, len(text.tokens))
        assert text.cancelled or len(text.tokens) == text.request.max_tokens


def test_a_server_is_ready_once_also_when_a_rank_was_lost_before_all_were_together() -> None:
    job = Job(str(BUNDLED), ("float32",), (), 1, 0.0, 0, 1.0, 0, False)
    scheduler = Scheduler(ServeOptions(job, streams=1), load_tokenizer(BUNDLED), VOCAB, CONTEXT)
    ready = list[str]()
    head = Head(scheduler, Cluster(2), lambda: ready.append("listening"), lambda kind, value: None)
    for _ in range(2):
        head.lost(PeerLostError("connection closed", 1))
        assert scheduler.why_not
        head.whole()
        assert (ready, scheduler.why_not) == (["listening"], "")
