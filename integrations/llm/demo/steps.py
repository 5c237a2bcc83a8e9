"""What ranks do next: the head rank decides, and tells the others through the group."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass

from hostring import Comm
from hostring.integrations.llm.request import HEAD_RANK

WAIT, ANSWER, CONTROLS, END = range(4)


@dataclass(frozen=True)
class Step:
    """What all ranks do next.

    Attributes:
        what: WAIT, ANSWER, CONTROLS or END.
        more: another prompt may come after this.
        fresh: the first prompt since the ranks came together.
        ids: the prompt.
    """

    what: int
    more: bool = False
    fresh: bool = False
    ids: tuple[int, ...] = ()


def share(comm: Comm, step: Step | None) -> Step:
    """The head rank's step, on every rank. A collective; others pass None.

    When it returns, every rank has a prompt: one that died while there was none fails this call, not the answer.
    """
    told = b"" if step is None else json.dumps(asdict(step)).encode()
    fields = json.loads(comm.broadcast_bytes(told, root=HEAD_RANK))
    if fields["ids"]:
        comm.barrier()
    return Step(**{**fields, "ids": tuple(fields["ids"])})
