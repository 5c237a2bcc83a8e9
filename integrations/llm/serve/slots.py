"""Which KV cache holds what, as the head rank knows it. The head alone decides what is kept and what is forgotten."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass
class KvSlot:
    """One KV cache, which every rank has.

    Attributes:
        ids: of its positions, while no sequence has it.
        used: when it was last given back, as a count.
    """

    number: int
    ids: list[int] = field(default_factory=list)
    used: int = 0


class KvSlots:
    """The free slots and what they hold."""

    def __init__(self, count: int) -> None:
        self._free = [KvSlot(number) for number in range(count)]
        self._count, self._given_back = count, 0

    @property
    def free(self) -> int:
        return len(self._free)

    def take(self, ids: Sequence[int]) -> tuple[int, int]:
        """A free slot for a prompt: the one whose cache begins most like it, else the one used longest ago.

        A cache that would lose more than half of what it holds counts as one that has nothing in common.

        Returns:
            its number, and how many positions of its cache are right for the prompt. The last token of the prompt is
            never among them: its logits are wanted.
        """
        common = {slot.number: common_start(slot.ids, ids[:-1]) for slot in self._free}

        def worth(slot: KvSlot) -> tuple[int, int]:
            kept = common[slot.number]
            return (kept if 2 * kept >= len(slot.ids) else 0, -slot.used)

        best = max(self._free, key=worth)
        self._free.remove(best)
        return best.number, common[best.number]

    def give_back(self, number: int, ids: Sequence[int]) -> None:
        """A sequence is done with its slot; `ids` are of the positions that its cache holds."""
        self._given_back += 1
        self._free.append(KvSlot(number, list(ids), self._given_back))

    def forget(self) -> None:
        """All slots are free, and hold nothing: after a failure of the group, ranks may have different positions."""
        self._free = [KvSlot(number) for number in range(self._count)]


def common_start(a: Sequence[int], b: Sequence[int]) -> int:
    """How many ids are the same from the start."""
    return next((n for n, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
