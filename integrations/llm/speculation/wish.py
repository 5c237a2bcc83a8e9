"""What kind of guesses is wanted."""

from __future__ import annotations

from dataclasses import dataclass

OFF, LOOKUP = "off", "lookup"
KINDS = (OFF, LOOKUP)
DEFAULT_MOST, MAX_MOST = 7, 14  # guesses for a text in one step; with 16 rows, packed ranks may multiply in another way


@dataclass(frozen=True)
class Speculation:
    """What kind of guesses, and how many.

    Attributes:
        kind: "off", or "lookup" for guesses from the text itself.
        draft: a smaller model of the same vocabulary, which guesses where the text itself does not; empty for none.
        most: guesses for a text in one step. A step has fewer where fewer pay, by measurement.
        always: don't measure.
    """

    kind: str = OFF
    draft: str = ""
    most: int = DEFAULT_MOST
    always: bool = False

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(f"--speculate {self.kind} is not one of {', '.join(KINDS)}")
        if not 1 <= self.most <= MAX_MOST:
            raise ValueError(f"--draft-max {self.most}: between 1 and {MAX_MOST} guesses are possible")

    @property
    def on(self) -> bool:
        return self.kind != OFF or bool(self.draft)
