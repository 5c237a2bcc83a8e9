"""The same prompt on one rank alone, and in one dtype on all ranks: what the figures of a run are worth."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import hostring
from hostring.integrations.llm.demo.rank_model import RankModel, Report, computes_in, gather
from hostring.integrations.llm.generation import Generation

_ALONE_WAIT_S = 3600.0  # how long ranks wait while another one runs its control alone


class Controls:
    """Runs the controls, and keeps what they found, on the head rank."""

    def __init__(self) -> None:
        self._found: dict[str, Any] = {}

    def run(self, model: RankModel, ids: Sequence[int]) -> None:
        """Generate the same again, otherwise. A collective: every rank calls it."""
        kinds = _kinds(model)
        self._found["one_rank"] = _one_rank_each(model, ids, kinds)
        alike = (model.job.dtypes[0],) * model.comm.world_size
        if alike != model.job.dtypes and {kind for kind, _ in kinds} != {"packed"}:
            self._found["same_dtype"] = _control(*model.again(ids, model.comm, alike))

    def beside(self, model: RankModel, generation: Generation, reports: list[Report]) -> dict[str, Any]:
        """What was found, beside the run. When all ranks have the dtype of rank 0, the run is its own control."""
        if not self._found:
            return {}
        itself = "same_dtype" not in self._found
        same = _control(generation, reports) if itself else self._found["same_dtype"]
        marked = same | {"is_the_run_itself": itself}
        controls = {"one_rank": self._found["one_rank"], "same_dtype": marked}
        for control in (*controls["one_rank"], controls["same_dtype"]):
            control["tokens_in_common"] = _common(control["tokens"], generation.tokens)
        return controls


def _one_rank_each(model: RankModel, ids: Sequence[int], kinds: list[tuple[str, str]]) -> list[dict[str, Any]]:
    """The whole model on one rank alone, once for each dtype and device, one after the other. On the head rank."""
    found: list[dict[str, Any]] = []
    for kind in dict.fromkeys(kinds):
        owner = kinds.index(kind)
        control: dict[str, Any] = {}
        if model.comm.rank == owner:
            with hostring.init(0, 1, rejoin=False) as alone:
                again = model.again(ids, alone, (model.job.dtypes[owner],))
            control = _control(*again) | {"rank": owner, "device": kind[1]}
        model.comm.barrier(timeout=_ALONE_WAIT_S)
        everyone = gather(model.comm, control)
        found += everyone[owner : owner + 1]
    return found


def _kinds(model: RankModel) -> list[tuple[str, str]]:
    """What every rank computes in, and on which device. A collective."""
    mine = model.model(model.comm, model.job.dtypes)
    words = f"{computes_in(mine, model.job.dtypes[model.comm.rank])} {model.device}"
    found = [payload.decode().split(" ", 1) for payload in model.comm.gather_bytes(words.encode())]
    return [(kind, device) for kind, device in found]


def _control(generation: Generation, reports: list[Report]) -> dict[str, Any]:
    names = ("decode_tokens_per_s", "ttft_s", "prefill_tokens_per_s")
    figures = {name: getattr(generation.stats, name) for name in names}
    figures["dtype"] = reports[0]["dtype"] if reports else ""
    figures["logits_sha256"] = generation.stats.logits_sha256
    return {**figures, "tokens": generation.tokens, "activation_sha256": [r["activation_sha256"] for r in reports]}


def _common(ours: list[int], theirs: list[int]) -> int:
    """How many tokens agree before the first that differs."""
    pairs = zip(ours, theirs, strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(ours), len(theirs)))
