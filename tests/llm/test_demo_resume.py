"""A talk goes on after a rank is lost and comes back. Ranks are threads."""

from __future__ import annotations

import threading
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
from demo_jobs import PROMPTS, job, measured, silent
from ranks import in_threads, side_by_side

import hostring
from hostring.integrations.llm.demo import rank_model
from hostring.integrations.llm.demo.measure import measure
from hostring.rendezvous import MemoryStore


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_several_prompts_are_answered_as_if_each_were_alone(temperature: float) -> None:
    how = {"temperature": temperature, "dtypes": ("float16", "bfloat16")}
    alone = [measured(job(prompt, **how)) for prompt in PROMPTS]
    assert all("turns" not in result for result in alone)
    together = measured(job(*PROMPTS, PROMPTS[0], **how))
    turns = together.pop("turns")
    assert [turn["tokens"] for turn in turns] == [alone[i]["tokens"] for i in (0, 1, 0)]
    assert [turn["text"] for turn in turns] == [alone[i]["text"] for i in (0, 1, 0)]
    assert (
        together["activation_sha256"] == alone[0]["activation_sha256"]
    )  # figures of the last one, with an empty cache
    assert list(together) == list(alone[0])


def test_a_prompt_that_cant_be_answered_does_not_end_the_run() -> None:
    result = measured(job("so " * 600, PROMPTS[1]))
    first, second = result["turns"]
    assert (first["complete"], first["stop_reason"]) == (False, "refused")
    assert "don't fit the KV cache" in first["error"]
    assert second["tokens"] == measured(job(PROMPTS[1]))["tokens"]


@pytest.mark.parametrize("dead", [1, 2])
@pytest.mark.parametrize("topology", ["mesh", "ring", "star"])
def test_every_topology_goes_on(topology: str, dead: int) -> None:
    """Links end as those of a killed process; the one that comes back is a thread of its own."""
    store, gone, work = MemoryStore(), threading.Event(), job(*PROMPTS, patience=20.0)
    comms: dict[int, hostring.Comm] = {}
    told: list[tuple[str, Any]] = []
    results: dict[int, Any] = {}

    def tell(kind: str, value: Any) -> None:
        told.append((kind, value))
        if kind == "text" and not gone.is_set() and sum(k == "text" for k, _ in told) > 5:
            comms[dead].session.group.abort()
            gone.set()

    def body(who: int, rank: int, rejoins: bool) -> None:
        if rejoins:
            assert gone.wait(40)
        try:
            with hostring.init(
                rank, 3, store=store, transport="tcp", topology=topology, timeout=20, rejoin=rejoins
            ) as comm:
                comms.setdefault(rank, comm)
                stays = work if who != dead else replace(work, patience=0.0)
                results[who] = measure(stays, comm, tell if rank == 0 else silent)
        except Exception as exc:
            results[who] = exc

    places = ((0, 0), (1, 1), (2, 2), (3, dead))
    side_by_side([partial(body, who, rank, who == 3) for who, rank in places])
    assert isinstance(results.pop(dead), hostring.HostringError)
    result = results.pop(0)
    assert set(results.values()) == {None}, results
    first, second = result["turns"]
    assert first["lost"]["rank"] == dead
    assert 5 < len(first["tokens"]) < 24
    assert first["tokens"] == measured(job(PROMPTS[0]))["tokens"][: len(first["tokens"])]
    assert second["tokens"] == measured(job(PROMPTS[1]))["tokens"]
    assert [kind for kind, _ in told if kind in ("lost", "whole")] == ["lost", "whole"]


def test_a_rank_that_does_not_come_back_in_time_ends_the_run() -> None:
    store, work = MemoryStore(), job(*PROMPTS, dtypes=("float32",) * 2, patience=1.0)
    comms: dict[int, hostring.Comm] = {}
    lost: list[Any] = []

    def tell(kind: str, value: Any) -> None:
        if kind == "text":
            comms[1].session.group.abort()
        elif kind == "lost":
            lost.append(value)

    def body(comm: hostring.Comm) -> Any:
        comms[comm.rank] = comm
        comm.barrier()
        return measure(
            work if comm.rank == 0 else replace(work, patience=0.0), comm, tell if comm.rank == 0 else silent
        )

    result, other = in_threads(2, body, check=False, store=store, transport="tcp")
    assert isinstance(other, hostring.HostringError)
    assert "waited in vain for ranks to come back (1 here, at least 2 needed)" in result["error"]
    assert [turn["complete"] for turn in result["turns"]] == [False]
    assert result["turns"][0]["tokens"]
    assert (lost[0]["rank"], lost[0]["waits"]) == (1, True)


def test_a_rank_that_is_lost_after_the_answer_costs_its_report_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    reported = rank_model.gather

    def gather(comm: hostring.Comm, report: Any) -> Any:
        if comm.rank == 1:
            comm.session.group.abort()
        return reported(comm, report)

    monkeypatch.setattr(rank_model, "gather", gather)
    work = job(PROMPTS[0], dtypes=("float32",) * 2)
    result, other = in_threads(2, lambda comm: measure(work, comm, silent), check=False, transport="tcp")
    assert isinstance(other, hostring.HostringError)
    (turn,) = result["turns"]
    assert (turn["complete"], turn["lost"], len(turn["tokens"])) == (True, None, 24)
    assert "rank 1 is lost" in result["error"]
    assert result["per_rank"] == []
