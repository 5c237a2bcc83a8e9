"""Which rank computes prompts, and which rank decodes."""

from __future__ import annotations

import re
from dataclasses import dataclass

N_RANKS = 2


@dataclass(frozen=True)
class Roles:
    """The rank that computes prompts and the rank that decodes. Both hold the whole model; the same on all ranks."""

    prefill: int
    decode: int

    @property
    def world_size(self) -> int:
        return N_RANKS

    def check(self, world_size: int) -> None:
        """Raise a ValueError unless a group of so many ranks can take these roles."""
        if {self.prefill, self.decode} != set(range(N_RANKS)):
            raise ValueError(
                f"prefill={self.prefill},decode={self.decode}: one rank computes the prompt and the other one decodes; "
                "possible are prefill=0,decode=1 and prefill=1,decode=0"
            )
        if world_size != N_RANKS:
            raise ValueError(
                f"prefill={self.prefill},decode={self.decode} is for {N_RANKS} ranks, and there are {world_size}; "
                f"start {N_RANKS}, or share the model out with --plan even"
            )


def asks_for_roles(text: str) -> bool:
    """Whether a plan names who computes prompts or who decodes, as `roles` reads it."""
    return re.match(r"(prefill|decode)\s*=", text.strip()) is not None


def roles(text: str, world_size: int | None = None) -> Roles:
    """The roles that `text` asks for, such as "prefill=0,decode=1".

    Raises:
        ValueError: `text` says something else, or the ranks can't take these roles.
    """
    found: dict[str, int] = {}
    for word in text.replace(" ", "").split(","):
        key, _, value = word.partition("=")
        if key in found or key not in ("prefill", "decode") or not value.isdecimal():
            raise ValueError(f"{word!r} in the plan {text!r}: expected prefill=RANK and decode=RANK, each once")
        found[key] = int(value)
    if len(found) < 2:
        raise ValueError(f"the plan {text!r} names one of two roles; give prefill=RANK,decode=RANK")
    both = Roles(**found)
    both.check(N_RANKS if world_size is None else world_size)
    return both
