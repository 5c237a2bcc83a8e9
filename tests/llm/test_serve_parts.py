"""The parts of a server, each for itself."""

from __future__ import annotations

import json

import numpy as np
import pytest

from hostring import HostringError, PeerLostError
from hostring.integrations.llm.checkpoint.tokenizer import load_tokenizer
from hostring.integrations.llm.demo.job import BUNDLED
from hostring.integrations.llm.model.sampling import Sampling
from hostring.integrations.llm.regroup import recoverable
from hostring.integrations.llm.serve import prefill
from hostring.integrations.llm.serve.choosing import Chooser, Logits
from hostring.integrations.llm.serve.guides import Guides
from hostring.integrations.llm.serve.http.answer_parts import AnswerParts
from hostring.integrations.llm.serve.http.tools import Tool, Tools
from hostring.integrations.llm.serve.prefill import CHUNKS, MAX_CHUNK, MIN_CHUNK, PrefillPace
from hostring.integrations.llm.serve.slots import KvSlots
from hostring.integrations.llm.serve.steps import FROM_PROMPT, Plan, Row, plan_width
from hostring.integrations.llm.serve.stops import StopScanner
from hostring.integrations.llm.serve.text_request import TextRequest

CALL = '<tool_call>\n{"name": "f", "arguments": {"a": "}<"}}\n</tool_call>'


def parts_of(pieces: list[str], **how: bool) -> list[tuple[str, str]]:
    """The parts of an answer, those of one kind in a row joined."""
    parts = AnswerParts(**how)
    found: list[tuple[str, str]] = []
    for part in [one for piece in pieces for one in parts.push(piece)] + parts.finish():
        if found and found[-1][0] == part.kind != "call":
            found[-1] = (part.kind, found[-1][1] + part.text)
        else:
            found.append((part.kind, part.text))
    return found


@pytest.mark.parametrize(
    ("text", "how", "wanted"),
    [
        ("Hello <there>", {}, [("content", "Hello <there>")]),
        ("<think>hm</think>\n\nYes", {"may_think": True}, [("reasoning", "hm"), ("content", "Yes")]),
        ("hm</think>\n\nYes", {"thinks": True}, [("reasoning", "hm"), ("content", "Yes")]),
        ("hm, no end", {"thinks": True}, [("reasoning", "hm, no end")]),
        ("<thin air", {"may_think": True}, [("content", "<thin air")]),
        (f"Well.{CALL}", {"calls": True}, [("content", "Well."), ("call", "f"), ("arguments", '{"a": "}<"}')]),
        (f"{CALL}\n{CALL}", {"calls": True}, [("call", "f"), ("arguments", '{"a": "}<"}')] * 2),
        (CALL, {}, [("content", CALL)]),
        ('<tool_call>\n{"name": "f', {"calls": True}, [("content", '<tool_call>\n{"name": "f')]),
        ("a <tool", {"calls": True}, [("content", "a <tool")]),
    ],
)
def test_an_answers_parts_do_not_depend_on_how_it_came(
    text: str, how: dict[str, bool], wanted: list[tuple[str, str]]
) -> None:
    for size in (1, 2, 3, 7, len(text)):
        assert parts_of([text[i : i + size] for i in range(0, len(text), size)], **how) == wanted, size


@pytest.mark.parametrize("size", [1, 2, 3, 5, 40])
def test_no_part_of_a_stop_text_is_shown(size: int) -> None:
    text, stops = "one two END three ENDING", ("END three", "ENDING", "zzz")
    scanner, shown = StopScanner(stops), ""
    for i in range(0, len(text), size):
        shown += scanner.push(text[i : i + size])
        assert "one two ".startswith(shown)
    assert (shown, scanner.found, scanner.finish()) == ("one two ", True, "")
    unfinished = StopScanner(stops)
    assert unfinished.push("a EN") + unfinished.finish() == "a EN"


def test_a_plan_travels_in_the_numbers_of_a_decision() -> None:
    for plan in (
        Plan(),
        Plan((Row(3, 1, 70_000), Row(0, 512, FROM_PROMPT)), admits=True),
        Plan(reports=True, ends=True),
    ):
        numbers = np.full(plan_width(2) + 5, -7, np.int32)
        plan.write(numbers)
        assert Plan.read(numbers) == plan


def test_a_prompt_gets_the_slot_that_knows_it() -> None:
    slots = KvSlots(3)
    for ids in ([1, 2, 3, 4], [5, 6, 7, 8]):
        number, kept = slots.take(ids)
        assert kept == 0
        slots.give_back(number, ids)
    number, kept = slots.take([5, 6, 7, 8, 9])
    assert kept == 4
    slots.give_back(number, [5, 6, 7, 8, 9])
    again, kept = slots.take([5, 6, 7, 8])
    assert (again, kept) == (number, 3)  # the last one is computed again: its logits are wanted
    other, kept = slots.take([1, 2, 3, 4, 5])
    assert (other == again, kept) == (False, 4)
    slots.forget()
    assert (slots.free, slots.take([1, 2, 3, 4, 5])[1]) == (3, 0)


def _read(positions: int, start: int = 0) -> tuple[list[Row], int]:
    return [Row(0, 1, 5), Row(1, positions, FROM_PROMPT)], start


def _noted(pace: PrefillPace, positions: int, seconds: float, start: int = 0) -> None:
    rows, start = _read(positions, start)
    pace.note(rows, 0.01 + seconds, start)


def test_prompts_are_cut_so_that_texts_under_way_go_on() -> None:
    pace = PrefillPace(0.2)
    assert (pace.budget(0, 0), pace.budget(1, 0)) == (MAX_CHUNK, MIN_CHUNK)
    pace.note([Row(0, 1, 5)], 0.01, 0)
    for chunk in CHUNKS[:9]:  # up to 192
        _noted(pace, chunk, chunk * 0.001)
    assert pace.budget(1, 0) == 256  # which is tried once: 0.256 s may be too much, and may not
    _noted(pace, 256, 0.256)
    assert (pace.budget(1, 0), pace.budget(10, 0)) == (128, 96)  # (0.2 - 0.01) s and (0.2 - 0.1) s at 1 ms each
    assert pace.budget(50, 0) == MIN_CHUNK


def test_a_chunk_whose_cost_is_mostly_the_same_for_any_size_is_found() -> None:
    """0.1 s and 3 ms a position from 24 positions on, 10 ms and more below: 0.16 s for 16 say nothing of 32."""
    pace = PrefillPace(0.25)
    pace.note([Row(0, 1, 5)], 0.01, 0)
    for chunk, seconds in ((8, 0.09), (16, 0.16), (24, 0.172), (32, 0.196), (48, 0.244), (64, 0.292)):
        assert pace.budget(1, 0) == chunk  # each was tried once, though twice the time of the smaller one is too long
        _noted(pace, chunk, seconds)
    assert pace.budget(1, 0) == 32


def test_where_no_chunk_fits_the_smallest_one_is_taken() -> None:
    pace = PrefillPace(0.2)
    pace.note([Row(0, 1, 5)], 0.01, 0)
    for chunk, seconds in ((8, 0.25), (16, 0.30), (24, 0.35), (32, 0.39)):
        _noted(pace, chunk, seconds)
    assert pace.budget(1, 0) == MIN_CHUNK


def test_positions_that_attend_to_many_others_are_fewer(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(prefill, "monotonic", lambda: now[0])
    pace = PrefillPace(0.2)
    pace.note([Row(0, 1, 5)], 0.01, 0)
    for chunk in CHUNKS[:8]:  # up to 128
        _noted(pace, chunk, 0.01 + chunk * 0.0026)
        _noted(pace, chunk, chunk * 0.0095, start=1000)
    assert [pace.budget(1, start) for start in (0, 100, 1000, 1500)] == [64, 64, 16, 16]
    now[0] = 301.0
    assert pace.budget(1, 1000) == MIN_CHUNK  # nothing is known any more


@pytest.mark.parametrize("parallel", [False, True])
def test_text_is_free_until_a_call_begins(parallel: bool) -> None:
    """Then its name and its arguments are those of a function."""
    schema = {
        "type": "object",
        "properties": {"n": {"type": "integer"}},
        "required": ["n"],
        "additionalProperties": False,
    }
    tokenizer = load_tokenizer(BUNDLED)
    guide = Guides(tokenizer).of(Tools((Tool("f", schema, {}), Tool("g", {}, {})), False, parallel).grammar)
    call = '<tool_call>\n{"name": "f", "arguments": {"n": 5}}\n</tool_call>'

    def fits(text: str) -> bool:
        one = guide.another()
        for token in tokenizer.encode_bare(text):
            if not one.allowed(np.array([token], np.int32))[0]:
                return False
            one.accept(token)
        return True

    assert fits("In the beginning < was {}")
    assert fits(f"So be it. {call}")
    assert fits(f"{call}\n{call}") is parallel
    assert not fits('So <tool_call>\n{"name": "h')
    assert not fits('<tool_call>\n{"name": "f", "arguments": {"n": "x')
    assert not fits("<tool_call> nonsense")
    assert not guide.allowed(np.array([-1, 10**6], np.int32)).any()


def test_penalties_and_bias_change_the_choice() -> None:
    logits = Logits(np.array([3.0, 2.9, 1.0], np.float32), np.array([10, 20, 30], np.int32))
    plain = Chooser(TextRequest((1,), 9, Sampling()))
    assert [plain.choose(logits) for _ in range(3)] == [10, 10, 10]
    penalised = Chooser(TextRequest((1,), 9, Sampling(), frequency_penalty=0.15))
    assert [penalised.choose(logits) for _ in range(4)] == [10, 20, 10, 20]
    present = Chooser(TextRequest((1,), 9, Sampling(), presence_penalty=2.0))
    assert [present.choose(logits) for _ in range(4)] == [10, 20, 10, 10]
    biased = Chooser(TextRequest((1,), 9, Sampling(), logit_bias={30: 5.0, 40: 100.0}))
    assert biased.choose(logits) == 30


def test_words_for_tools_hold_each_signature() -> None:
    given = {"type": "function", "function": {"name": "f"}}
    assert json.dumps(given) in Tools((Tool("f", {}, given),), False, True).words


@pytest.mark.parametrize(
    ("lost", "waits"),
    [
        (PeerLostError(1, "connection closed"), True),
        (PeerLostError(0, "connection closed"), False),
        (PeerLostError(0, "recv: [Errno 110] Connection timed out, in all_reduce #23"), True),
        (HostringError("no rank is named"), False),
    ],
)
def test_the_head_is_waited_for_where_a_cable_may_be_cut(lost: HostringError, waits: bool) -> None:
    assert recoverable(lost) is waits
