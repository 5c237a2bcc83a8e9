"""An evidence pack: measured on live ranks; cells can't be filled by hand; bypasses make it invalid; one page, no
request."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from ranks import in_threads

pytest.importorskip("jsonschema")

from hostring.integrations.llm.demo.job import BUNDLED, make_job
from hostring.integrations.llm.evidence import about, llama_cpp
from hostring.integrations.llm.evidence.cells import absent, measured, ratio
from hostring.integrations.llm.evidence.pack import build, check, promotion
from hostring.integrations.llm.evidence.page import page
from hostring.integrations.llm.evidence.rank import Task, run_rank
from hostring.integrations.llm.evidence.run import evidence
from hostring.integrations.llm.model.tensor_parallel import HiddenReducer

ABOUT = {
    "command": "hostring evidence MODEL --out DIR",
    "dtypes": ["float16", "bfloat16"],
    "model": about.of_model(BUNDLED),
    "host": about.of_host(),
    "versions": about.versions(),
    "watts": absent("the platform gives no energy counters"),
    "cost": absent("the platform gives no price"),
}


def found(max_tokens: int = 4, lengths: tuple[int, ...] = (3, 20), rounds: int = 2) -> dict[str, Any]:
    sampling = {"temperature": 0.0, "top_k": 0, "top_p": 1.0, "seed": 0}
    job = make_job(model=None, ranks=2, dtypes=None, prompts=(), max_tokens=max_tokens, controls=True, **sampling)
    task = Task(job.to_json(), lengths, rounds, "In the beginning", "")
    result = in_threads(2, lambda comm: run_rank(job, comm, task))[0]
    return json.loads(json.dumps(result))


@pytest.fixture(scope="module")
def measurements() -> dict[str, Any]:
    return found()


def peers(rate: float) -> dict[int, list[dict[str, Any]]]:
    return {1: [{"length": n, "decode": [rate, rate, 2 * rate], "prefill": [9.0] * 3} for n in (3, 20)]}


@pytest.fixture
def pack(measurements: dict[str, Any]) -> dict[str, Any]:
    return build(measurements, peers(0.5), ABOUT)


def test_an_honest_run_is_valid_and_every_figure_was_measured(pack: dict[str, Any]) -> None:
    assert pack["faults"] == []
    assert pack["valid"]
    assert [one["prompt_tokens"] for one in pack["lengths"]] == [3, 20]
    for one in pack["lengths"]:
        assert len(one["decode_tokens_per_s"]["samples"]) == 2
        assert one["predicted_decode_tokens_per_s"]["kind"] == "absent"
        assert 0 < one["collective_fraction"]["value"] < 1
        assert one["hidden_transfer_s_per_token"]["kind"] == "absent"
    assert [(r["rank"], r["region"]) for r in pack["regions"]] == [
        (rank, region) for rank in (0, 1) for region in ("attention", "MLP")
    ]
    assert {a["dtype"] for a in pack["one_rank"]} == {"float16", "bfloat16"}
    assert not pack["same_dtype"]["is_the_run_itself"]
    assert len(pack["outputs"]) == 4


def test_a_run_slower_than_llama_cpp_on_one_node_is_not_promoted(measurements: dict[str, Any]) -> None:
    slow = build(measurements, peers(1e6), ABOUT)
    assert slow["best_single_node"]["what"] == "llama.cpp on 1 thread"
    assert not slow["promoted"]
    assert re.match(r"not promoted: 0.00 times as fast as the best single node, llama.cpp", slow["promotion"])
    missing = build(measurements, "xllamacpp is not installed", ABOUT)
    assert missing["llama_cpp"] == absent("xllamacpp is not installed")
    assert not missing["promoted"]


def test_a_run_as_fast_as_the_best_single_node_is_promoted(measurements: dict[str, Any]) -> None:
    fast = copy.deepcopy(measurements)
    for one in fast["controls"]["one_rank"]:
        one["decode_tokens_per_s"] = 0.5
    shown = build(fast, peers(0.5), ABOUT)
    assert shown["promoted"], shown["promotion"]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda p: p["lengths"][0].update(hidden_transfer_s_per_token=0.0), "not as its schema says, at "),
        (lambda p: p["lengths"][0].update(ttft_s={"kind": "measured", "value": 1.0, "unit": "s"}), "its schema"),
        (lambda p: p["lengths"][0]["ttft_s"].update(samples=[]), "not as its schema says"),
        (lambda p: p["lengths"][0]["ttft_s"].update(value=1e-9), "is not the median of"),
        (lambda p: p["scaling_efficiency"].update(value=2.0), "scaling_efficiency was not measured so: 2.0 is not"),
        (lambda p: p.pop("watts"), "'watts' is a required property"),
        (lambda p: p.update(watts=absent("")), "its schema"),
        (lambda p: p["outputs"][0]["ranks"][1].update(activation_sha256="0"), "rank 1 has reduced other activations"),
        (lambda p: p["outputs"][1]["ranks"][0].update(prefill_collectives=3), "3 collectives over the prompt counted"),
        (lambda p: p["outputs"][1].update(tokens_sha256="0" * 64), "gave 2 different answers"),
        (lambda p: p.update(promoted=True, against_best_single_node=absent("none")), "promoted, and is not"),
    ],
)
def test_what_was_filled_in_by_hand_is_refused(
    change: Callable[[dict[str, Any]], Any], said: str, pack: dict[str, Any]
) -> None:
    check(pack)
    change(pack)
    with pytest.raises(ValueError, match=re.escape(said)):
        check(pack)


def test_a_cell_without_samples_cannot_be_measured() -> None:
    for samples in ([], [None], [1.0, None]):
        with pytest.raises(ValueError, match="needs samples"):
            measured(samples, "s")
    assert ratio(measured([1.0], "s"), absent("no clock"), "times") == absent("no clock")


def skipped(reducer: HiddenReducer, partial: Any) -> Any:
    return partial


def row_skipped(reducer: HiddenReducer) -> Any:
    return reducer.row


def row_thrown_away(reducer: HiddenReducer) -> Any:
    reducer.comm.all_reduce(reducer.row.clone().numpy())
    return reducer.row


@pytest.mark.parametrize(
    ("method", "bypass", "said"),
    [
        ("__call__", skipped, "collectives over the prompt counted"),
        ("reduce_row", row_skipped, "collectives per token counted"),
        ("reduce_row", row_thrown_away, "computed with something else than what was reduced"),
    ],
)
def test_a_live_bypass_makes_the_pack_invalid(
    method: str, bypass: Callable[..., Any], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(HiddenReducer, method, bypass)
    pack = build(found(3, (3,), 1), "not asked", ABOUT)
    assert not pack["valid"]
    assert any(said in fault for fault in pack["faults"]), pack["faults"]
    assert promotion(pack) == (False, "not promoted: the run is not valid")


def test_a_prediction_stands_beside_what_was_measured(measurements: dict[str, Any]) -> None:
    planned = {"predicted": {"decode_tokens_per_s": {"predicted": 41.5, "unit": "tokens/s"}}}
    shown = build({**measurements, "planned": planned}, "not asked", ABOUT)
    assert shown["lengths"][0]["predicted_decode_tokens_per_s"] == {
        "kind": "predicted",
        "value": 41.5,
        "unit": "tokens/s",
    }
    assert "predicted 41.5" in page(shown)


def test_the_page_is_whole_escaped_and_asks_for_nothing(pack: dict[str, Any]) -> None:
    pack["command"] = "hostring <b>evidence</b>"
    text = page(pack)
    assert text.count("<svg") == text.count("</svg>") == 2
    assert "&lt;b&gt;evidence" in text
    assert not re.search(r"https?:|<script|<link|<img|@import|url\(", text)
    assert "prefers-color-scheme: dark" in text
    assert 'class="absent"' in text


def test_llama_cpp_takes_part_where_it_can(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "GGUF" in llama_cpp.why_absent(str(BUNDLED))
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert llama_cpp.why_absent("m.gguf") == "xllamacpp is not installed"


def test_the_pack_in_the_docs_is_what_it_claims() -> None:
    file = Path(__file__).parents[2] / "docs" / "evidence" / "smollm2" / "evidence.json"
    pack = json.loads(file.read_text(encoding="utf-8"))
    check(pack)
    assert pack["valid"]
    assert (file.parent / "index.html").read_text(encoding="utf-8") == page(pack)


@pytest.mark.parametrize(
    ("plan", "lengths", "error"),
    [
        ("pp=2", (8,), "evidence of a run with --plan pp=2 is not built"),
        ("even", (8, 512), "a prompt of 512 tokens and 16 more don't fit the 512 positions of this model"),
    ],
)
def test_what_can_not_be_measured_is_refused_before_ranks_start(
    plan: str, lengths: tuple[int, ...], error: str, tmp_path: Path
) -> None:
    sampling = {"temperature": 0.0, "top_k": 0, "top_p": 1.0, "seed": 0}
    job = make_job(model=None, ranks=2, dtypes=None, prompts=(), max_tokens=4, controls=True, plan=plan, **sampling)
    with pytest.raises(ValueError, match=re.escape(error)):
        evidence(job, tmp_path / "out", lengths, 1, "hostring evidence", print)
    assert not (tmp_path / "out").exists()
