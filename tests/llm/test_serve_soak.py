"""Many texts that begin, end and are cancelled at any time: each is what it is alone, and nothing stays behind.

`HOSTRING_TEST_SOAK_S` sets how long the slow one takes. `benchmarks/serve_soak.py` does it over HTTP with a real model.
"""

from __future__ import annotations

import contextlib
import os
import queue
import random
import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from llm_models import byte_tokenizer, packable_model, write_gguf
from serving_ranks import served

from hostring.integrations.llm.model.sampling import Sampling
from hostring.integrations.llm.packed.library import Unavailable, load
from hostring.integrations.llm.serve.scheduler import Scheduler
from hostring.integrations.llm.serve.serving import Serving
from hostring.integrations.llm.serve.text_request import Broken, Ended, Event, Piece, TextRequest

CLIENTS = 16
STREAMS = 6
SOAK_S = float(os.environ.get("HOSTRING_TEST_SOAK_S", "60"))


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from gguf import GGMLQuantizationType

    try:
        load()
    except Unavailable as exc:
        pytest.skip(str(exc))
    path = tmp_path_factory.mktemp("soak") / "m.gguf"
    return write_gguf(packable_model("qwen3", 4, 64), path, GGMLQuantizationType.Q4_1, byte_tokenizer(400))


def serving_of(path: Path, stages: tuple[tuple[int, ...], ...] = ()) -> contextlib.AbstractContextManager[Serving]:
    how = {"model": str(path), "same_bits": True, "stages": stages}
    return served(("float32",) * 2, how=how, streams=STREAMS, context=128)


def varied(count: int, rng: random.Random) -> list[TextRequest]:
    """Short and long, greedy and seeded; most begin like others, so that what is in the caches is used."""
    stems = [[rng.randrange(10, 390) for _ in range(60)] for _ in range(4)]
    found = []
    for _ in range(count):
        stem = rng.choice(stems)[: rng.choice((1, 7, 33, 60))]
        ids = (*stem, *(rng.randrange(10, 390) for _ in range(rng.choice((0, 1, 9)))))
        sampling = Sampling(rng.choice((0.0, 0.9)), rng.choice((0, 5)), 0.95, rng.randrange(100))
        found.append(TextRequest(ids, rng.choice((1, 2, 8, 30)), sampling, ignore_eos=True))
    return found


def continued(scheduler: Scheduler, request: TextRequest) -> TextRequest:
    """What was said and answered, and a little more: all of it but the last token of the answer is in a cache."""
    (sequence,) = scheduler.submit([request], [(ended := queue.Queue[Event]()).put])
    while not isinstance(ended.get(timeout=60), Ended):
        pass
    return replace(request, ids=(*request.ids, *sequence.tokens, 17))


def written(scheduler: Scheduler, request: TextRequest, wanted: int | None = None) -> tuple[bool, str]:
    """Whether the text is complete, and what came of it. Cancelled after `wanted` pieces, where that is a number."""
    events: queue.Queue[Event] = queue.Queue()
    (sequence,) = scheduler.submit([request], [events.put])
    text, pieces = "", 0
    if wanted == 0:
        scheduler.cancel(sequence)
        return False, ""
    while True:
        event = events.get(timeout=60)
        assert not isinstance(event, Broken), event
        if isinstance(event, Ended):
            return True, text
        if isinstance(event, Piece):
            text, pieces = text + event.text, pieces + 1
            if pieces == wanted:
                scheduler.cancel(sequence)
                return False, text


def client(
    scheduler: Scheduler, requests: Sequence[TextRequest], alone: Sequence[str], seed: int, until: float
) -> tuple[int, list[str]]:
    """How many texts were right, and which were not."""
    rng, right, wrong = random.Random(seed), 0, []
    while time.monotonic() < until:
        index = rng.randrange(len(requests))
        wanted = rng.choice((0, 1, 3, 10)) if rng.random() < 0.35 else None
        complete, text = written(scheduler, requests[index], wanted)
        if text == alone[index] if complete else alone[index].startswith(text):
            right += 1
        else:
            wrong.append(f"{text!r} instead of {alone[index]!r}: {requests[index]}")
    return right, wrong


def soak(server: Serving, seconds: float, seed: int) -> int:
    """How many texts were asked for, of which none was wrong."""
    scheduler = server.scheduler
    firsts = varied(12, random.Random(seed))
    requests = [*firsts, *(continued(scheduler, request) for request in firsts[:6])]
    alone = [written(scheduler, request)[1] for request in requests]
    assert len(set(alone)) > 8, "texts are too much alike to be confused"
    until = time.monotonic() + seconds
    results: list[tuple[int, list[str]]] = []
    clients = [
        threading.Thread(target=lambda n=n: results.append(client(scheduler, requests, alone, n, until)), daemon=True)
        for n in range(CLIENTS)
    ]
    for one in clients:
        one.start()
    for one in clients:
        one.join(seconds + 60)
    assert len(results) == CLIENTS, "clients failed or hang"
    assert not [text for _, wrong in results for text in wrong]
    idle_by = time.monotonic() + 20
    while scheduler.in_flight != (0, 0):
        assert time.monotonic() < idle_by, scheduler.in_flight
        time.sleep(0.01)
    assert [written(scheduler, request)[1] for request in requests] == alone
    return sum(right for right, _ in results)


def test_texts_that_come_and_go_are_what_they_are_alone(path: Path) -> None:
    with serving_of(path) as server:
        assert soak(server, 1.0, seed=1) >= CLIENTS
        ended = server.scheduler.totals.ended
        assert ended["cancelled"] > 0
        assert set(ended) == {"complete", "cancelled"}


@pytest.mark.slow
@pytest.mark.timeout(SOAK_S + 180)
@pytest.mark.parametrize("stages", [(), ((1, 1), (1, 1))], ids=["tensor parallel", "pipeline"])
def test_the_same_for_long(path: Path, stages: tuple[tuple[int, ...], ...]) -> None:
    """Neither KV caches nor threads become more."""
    with serving_of(path, stages) as server:
        soak(server, 2.0, seed=2)
        threads, held = threading.active_count(), kv_bytes(server)
        count = soak(server, SOAK_S, seed=3)
        print(f"{count} texts in {SOAK_S:g} s, {server.scheduler.totals}")
        assert threading.active_count() <= threads
        assert kv_bytes(server) == held


def kv_bytes(server: Serving) -> list[int]:
    """Of each rank, in its next report."""
    seen = server.cluster.snapshots[-1:]
    until = time.monotonic() + 20
    while server.cluster.snapshots[-1:] == seen:
        assert time.monotonic() < until
        time.sleep(0.05)
    return [report["kv_bytes"] for report in server.cluster.snapshots[-1].reports]
