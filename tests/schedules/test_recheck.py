"""A tuning is measured a second time, and kept when that confirms it."""

from __future__ import annotations

import dataclasses
import io
from pathlib import Path

import pytest
from rich.console import Console

from hostring.commands.tune import _keep
from hostring.cost.network import one_host
from hostring.tuning.recheck import Point, doubts, recheck
from hostring.tuning.saved import tuning_path
from hostring.tuning.tables import Curve, Tuning, load


def point(predicted, first, second, nbytes=1024):
    return Point("all_reduce", "mesh/one_shot", nbytes, predicted, first, second)


def test_what_is_measured_alike_twice_and_was_predicted_is_kept():
    points = [point(1.0, 1.1, 1.4, n) for n in range(10)] + [point(1.0, 0.8, 0.7, 100)]
    assert doubts(points) == []
    assert doubts([]) == []


@pytest.mark.parametrize("second", [1.6, 0.6])
def test_a_measurement_that_is_not_repeated_is_named(second):
    points = [point(1.0, 1.0, 1.0, n) for n in range(7)]
    assert doubts([*points, *(point(1.0, 1.0, second, 100 + n) for n in range(2))]) == [], "a quarter may differ"
    (words,) = doubts([*points, *(point(1.0, 1.0, second, 100 + n) for n in range(3))])
    assert words.startswith("3 of 10 choices took 1.5x as long, or as short, when measured again")
    assert "all_reduce of 100 bytes by mesh/one_shot 1000000.0 us, then" in words


def test_predictions_that_are_far_off_are_named():
    """As under load: 66 to 91 % too low."""
    points = [point(0.34, 1.0, 1.0, 1), point(0.2, 1.0, 1.0, 2), point(0.09, 1.0, 1.0, 3)]
    (words,) = doubts(points)
    assert words.startswith("predictions are 66 to 91 % off")
    assert doubts([dataclasses.replace(p, first=None) for p in points]) == [words], "without trials as well"
    assert doubts([point(0.9, 1.0, 1.0, n) for n in range(4)] + points) == [], "most are right"


def tuning_with(predicted, first):
    measured = {64: first, 4096: first}
    curve = Curve("all_reduce", "mesh", "one_shot", 1 << 16, {64: predicted, 4096: predicted}, measured)
    return Tuning("a test's tuning", one_host(3, 2), [curve])


@pytest.mark.parametrize(
    ("predicted", "first", "words"),
    [(1.0, 1e-9, "measured again"), (1e3, 1e3, "predictions are"), (1e-9, 1e-9, "predictions are")],
)
def test_every_rank_hears_the_same_doubts(run_ranks, predicted, first, words):
    def body(comm):
        tuning = tuning_with(predicted, first) if comm.rank == 0 else Tuning("", one_host(3, 2), [])
        return recheck(comm.session, tuning, (64, 4096), 1e-4)

    results = run_ranks(3, body)
    assert all(found == results[0] for found in results)
    assert any(words in doubt for doubt in results[0])


@pytest.mark.parametrize(
    ("doubt", "wanted", "saved"),
    [([], None, True), (["why"], None, False), (["why"], True, True), ([], False, False), (["why"], False, False)],
)
@pytest.mark.parametrize("elsewhere", [False, True])
def test_what_is_not_confirmed_is_not_saved_unless_that_is_wanted(
    run_ranks, monkeypatch, tmp_path, elsewhere, doubt, wanted, saved
):
    """`--no-save` keeps a table out of its place; in a file that is named it is saved, unless it is in doubt."""
    output = str(tmp_path / "tuning.json") if elsewhere else ""
    saved = saved or (elsewhere and not doubt)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("HOSTRING_TUNING", "off")

    def body(comm):
        printed = io.StringIO()
        if comm.rank == 0:
            _keep(Console(file=printed, width=200), comm.session, tuning_with(1.0, 1.0), output, doubt, wanted)
        path = Path(output) if output else tuning_path(comm.session)
        return printed.getvalue(), path.exists() and load(path).source

    text, source = run_ranks(3, body)[0]
    assert (source == "a test's tuning") == saved
    assert ("saved to" in text) == saved
    assert ("not confirmed: why" in text) == bool(doubt)
    if doubt and not wanted and (elsewhere or wanted is None):
        assert "not saved: try again when nothing else runs on these hosts" in text
        assert "--save" in text


def test_a_file_that_was_asked_for_is_checked_as_well(run_ranks, tmp_path):
    def body(comm):
        if comm.rank == 0:
            _keep(Console(quiet=True), comm.session, tuning_with(1.0, 1.0), str(tmp_path / "t.json"), ["why"], None)

    run_ranks(2, body)
    assert list(tmp_path.iterdir()) == []
