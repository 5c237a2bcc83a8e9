"""The golden arithmetic of a token's budget, and figures that say that nobody measured them."""

from __future__ import annotations

import pytest

from hostring.integrations.llm.planning.budget import Budget, boundary_nbytes, lower_bound, token_nbytes
from hostring.integrations.llm.planning.predicted import LowerBound, Predicted


def test_twenty_milliseconds_over_93_layers() -> None:
    budget = Budget(50, 93, 10e-6)
    assert budget.token_s == 0.020
    assert round(1e6 * budget.layer_s) == 215
    assert budget.collectives == 186
    assert budget.communication_s == pytest.approx(1.86e-3)
    assert budget.communication_share == pytest.approx(0.093)
    assert Budget(100, 93, 10e-6).communication_share == pytest.approx(0.186)
    assert budget.feasible
    assert "215 us per layer" in budget.in_words()
    assert "9.3 %" in budget.in_words()


def test_collectives_that_leave_no_time_are_infeasible() -> None:
    budget = Budget(50, 93, 200e-6)
    assert not budget.feasible
    assert "INFEASIBLE" in budget.in_words()
    assert budget.as_json()["feasible"] is False


def test_without_a_measured_collective_the_limit_is_said() -> None:
    budget = Budget(50, 93)
    assert budget.feasible
    assert "each must stay well below 108 us" in budget.in_words()


def test_bytes_of_a_hidden_state() -> None:
    assert boundary_nbytes(8192, 1, 2) == 16 * 1024
    assert boundary_nbytes(8192, 32, 2) == 512 * 1024
    assert token_nbytes(8192, 93, 1, 2) == 186 * 16 * 1024  # about 3 MB
    assert round(token_nbytes(8192, 93, 1, 2) / 1e6, 1) == 3.0


def test_the_bound_is_the_longer_of_memory_and_arithmetic_and_then_the_collectives() -> None:
    assert lower_bound(10e9, 1e9, 10e9, 1e12, 0.5).seconds == pytest.approx(1.5)
    assert lower_bound(1e9, 5e12, 10e9, 1e12).seconds == pytest.approx(5.0)
    assert lower_bound(1e9, 5e12, None, 1e12).seconds == pytest.approx(5.0)


def test_predicted_figures_say_so_and_are_no_numbers() -> None:
    assert str(Predicted(12.5, "tokens/s")) == "predicted 12.5 tokens/s"
    assert Predicted(12.5, "tokens/s").as_json() == {"predicted": 12.5, "unit": "tokens/s"}
    assert str(LowerBound(0.002)) == "OPTIMISTIC LOWER BOUND 2 ms"
    assert LowerBound(0.002).as_json()["label"] == "OPTIMISTIC LOWER BOUND"
    with pytest.raises(TypeError):
        Predicted(1.0, "s") + 1.0  # type: ignore[operator]
