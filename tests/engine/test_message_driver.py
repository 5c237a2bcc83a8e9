"""Whoever drives the messages looks again before it sleeps: often where that pays, seldom where it doesn't."""

from __future__ import annotations

from collections.abc import Callable

from hostring.engine.control import Control
from hostring.engine.message_driver import MessageDriver
from hostring.engine.work import Work


class Traffic:
    """Nothing comes while somebody looks, but for the looks in `arrivals`. Counts the looks before each sleep."""

    def __init__(self, arrivals: set[int] = frozenset()) -> None:
        self.rank, self.cause = 0, None
        self.arrivals = arrivals
        self.looks = 0
        self.before_sleeps: list[int] = []
        self._since = 0

    def move(self) -> bool:
        self.looks += 1
        return self.looks in self.arrivals

    def expire(self) -> None:
        self.before_sleeps.append(self.looks - self._since)

    def arm(self, poller) -> list[float]:
        return [0.0]  # a deadline that has passed: the sleep ends at once

    def awake(self, events) -> None:
        self._since = self.looks


class Until(Work):
    """Complete when it is said to be."""

    def __init__(self, completed: Callable[[], bool]) -> None:
        super().__init__("a test")
        self.completed = completed

    def is_completed(self) -> bool:
        return self.completed()


def sleeps(arrivals: set[int], n_sleeps: int) -> list[int]:
    traffic = Traffic(arrivals)
    driver = MessageDriver(traffic, Control(0, {}))
    driver.help(Until(lambda: len(traffic.before_sleeps) >= n_sleeps))
    driver.close(0.0)
    return traffic.before_sleeps


def test_looking_in_vain_is_given_up_step_by_step():
    looked = sleeps(set(), 12)
    assert looked[0] > 100
    assert looked == sorted(looked, reverse=True)
    assert looked[-1] < 10


def test_looking_that_pays_is_kept():
    """Once bytes come while it looks, it looks as long as before."""
    before = sum(sleeps(set(), 8))
    arrivals = {before + 50 + 3 * k for k in range(12)}
    looked = sleeps(arrivals, 40)
    assert min(looked[:8]) < 10
    assert max(looked[8:]) > 100


def test_what_wakes_a_sleeper_is_no_reason_to_look_longer():
    """With busy processes beside two ranks, every message came during a sleep; they looked 200 times before each."""

    class Wakes(Traffic):
        def awake(self, events) -> None:
            super().awake(events)
            self.arrivals.add(self.looks + 1)  # a message, as soon as this rank is awake

    traffic = Wakes(set())
    driver = MessageDriver(traffic, Control(0, {}))
    driver.help(Until(lambda: len(traffic.before_sleeps) >= 12))
    driver.close(0.0)
    assert traffic.before_sleeps[0] > 100
    assert traffic.before_sleeps[-1] < 10
