"""The decode rank chooses every token, and tells the other rank: no collective, and no wait for an answer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from hostring import Comm
from hostring.integrations.llm.handover.blocks import BlockFormat
from hostring.integrations.llm.handover.roles import Roles
from hostring.integrations.llm.handover.transfer import (
    CANDIDATES_TAG,
    CONFIRM_NBYTES,
    TOKEN_TAG,
    BlockReceiver,
    BlockSender,
    Figures,
)
from hostring.integrations.llm.model.expected import Expected

Numbers = npt.NDArray[np.int32]
TOKEN_NUMBERS = 2  # of a decision that says one token


class Handing:
    """What one of two ranks says to the other; also the `Deciding` of their model.

    Args:
        form: how keys and values travel. n_layers: of the model.

    Attributes:
        sender: of the rank that computes prompts. receiver: of the rank that decodes.
        computed_here: this rank has the logits of the last step.
    """

    def __init__(self, comm: Comm, roles: Roles, form: BlockFormat, n_layers: int) -> None:
        self._roles, self._form, self._n_layers = roles, form, n_layers
        self.computed_here = False
        self.move_to(comm)

    def move_to(self, comm: Comm) -> None:
        """Go on in a rebuilt group. What was under way is forgotten."""
        self._comm = comm
        self.sender = BlockSender(comm, self._roles.decode, self._form)
        self.receiver = BlockReceiver(comm, self._roles.prefill, self._form)

    @property
    def prefills(self) -> bool:
        """This rank computes prompts."""
        return self._comm.rank == self._roles.prefill

    def decide(self, mine: Numbers, choose: Callable[[Numbers], Numbers], n: int) -> Numbers:
        """See `Deciding.decide`."""
        comm, roles = self._comm, self._roles
        if not self.prefills:
            if not self.computed_here:
                comm.recv(mine, roles.prefill, CANDIDATES_TAG)
            answer = choose(mine[None])
            comm.send(answer[:TOKEN_NUMBERS], roles.prefill, TOKEN_TAG)
            return answer
        self.sender.drain()
        if self.computed_here:
            comm.send(mine, roles.decode, CANDIDATES_TAG)
        answer = np.zeros(n, np.int32)
        comm.recv(answer[:TOKEN_NUMBERS], roles.decode, TOKEN_TAG)
        return answer

    def expected(self, decided: tuple[int, int]) -> Expected:
        """See `Deciding.expected`."""
        return HandoverTraffic(self.prefills, self._n_layers, self._form, decided[0])

    def restart(self) -> None:
        """See `Deciding.restart`."""
        self.sender.figures, self.receiver.figures = Figures(), Figures()

    def figures(self) -> dict[str, Any]:
        """See `Deciding.figures`."""
        own = self.sender.figures if self.prefills else self.receiver.figures
        return {"role": "prefill" if self.prefills else "decode", **own.as_dict()}


class HandoverTraffic:
    """What the steps of a generation send on this rank, for one token and for the prompt; see `Traffic`."""

    def __init__(self, prefills: bool, n_layers: int, form: BlockFormat, n_numbers: int) -> None:
        self._prefills, self._n_layers, self._form, self._n_numbers = prefills, n_layers, form, n_numbers

    def collectives(self, passes: Sequence[int]) -> int:
        """None: both ranks compute alone, and send messages."""
        return 0

    def nbytes(self, passes: Sequence[int]) -> int:
        """Payload of forward passes over these numbers of rows, and of the choice after the last of them."""
        handed = [n for n in passes if n > 1]
        if not self._prefills:
            return 4 * TOKEN_NUMBERS + CONFIRM_NBYTES * self._n_layers * len(handed)
        candidates = 4 * self._n_numbers if passes[-1] > 1 else 0
        return self._n_layers * sum(map(self._form.nbytes, handed)) + candidates
