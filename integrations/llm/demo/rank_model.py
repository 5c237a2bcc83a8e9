"""One rank's model, and its generations with a report from every rank."""

from __future__ import annotations

import gc
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from hostring import Comm
from hostring.integrations.llm.compute import stay
from hostring.integrations.llm.conversation import Conversation
from hostring.integrations.llm.demo.job import Job
from hostring.integrations.llm.demo.planned import plan_together
from hostring.integrations.llm.generate import Model, load_model
from hostring.integrations.llm.generation import Generation
from hostring.integrations.llm.handover.forward import HandoverForward
from hostring.integrations.llm.model.devices import find_device
from hostring.integrations.llm.model.sampling import Sampling
from hostring.integrations.llm.pipeline.staged import StagedForward
from hostring.integrations.llm.request import HEAD_RANK
from hostring.integrations.llm.rows.forward import RowsForward
from hostring.integrations.llm.xray.recording import Recording

Report = dict[str, Any]

_WARM_UP_TOKENS = 4  # the first steps allocate, build their messages and wake the kernels


class RankModel:
    """What all generations on one rank share.

    Attributes:
        continued: the model continues a prompt rather than answer it.
        conversation: what was said, in a chat; None where every prompt is answered for itself.
        plan: who holds what.
    """

    def __init__(self, job: Job, comm: Comm, device: str = "cpu") -> None:
        self.comm, self.device = comm, find_device(device)
        self.job = plan_together(job, comm, self.device)
        self.sampling = Sampling(job.temperature, job.top_k, job.top_p, job.seed)
        self._loaded: tuple[tuple[str, ...], Model] | None = None
        self._packed_ranks: Sequence[bool] | None = None  # of the group, once it has agreed
        model = self.model(comm, self.job.dtypes)
        self.continued = not model.tokenizer.templates.sources
        self.conversation = Conversation(model) if job.chat else None
        self._recording = Recording(model) if job.xray else None

    @property
    def default_prompts(self) -> tuple[str, ...]:
        if self.job.chat:
            return ()
        return ("In the beginning" if self.continued else "Why is the sky blue? Answer in two sentences.",)

    def ids(self, prompt: str) -> list[int]:
        if self.conversation is not None:
            return self.conversation.ids(prompt)
        return self.model(self.comm, self.job.dtypes).prompt_ids(prompt)

    def model(self, comm: Comm, dtypes: tuple[str, ...]) -> Model:
        """This rank's part of the model; only the last one asked for is kept."""
        if self._loaded is None or self._loaded[0] != dtypes or self._loaded[1].comm is not comm:
            self._loaded = None
            gc.collect()
            model = load_model(
                self.job.model,
                comm,
                dtype=dtypes[comm.rank],
                device=self.device,
                hash_activations=True,
                compute=self.job.compute,
                plan=self.job.split if comm is self.comm else None,
                same_bits=self.job.same_bits,
                packed_ranks=self._packed_ranks if comm is self.comm else None,
                compile=self.job.compile_of(comm.rank) if comm is self.comm else False,
            )
            self._loaded = dtypes, model
            if comm is self.comm:
                model.speculate(self.job.speculation)
                self._packed_ranks, self.plan = model.packed_ranks, model.sharded.plan
        return self._loaded[1]

    def move_to(self, comm: Comm) -> None:
        """Go on in a rebuilt group; the weights stay where this rank is still the same."""
        self.job = plan_together(self.job, comm, self.device, loaded=self._loaded is not None)
        if self._loaded is not None and (comm.rank, comm.world_size) == (self.comm.rank, self.comm.world_size):
            self._packed_ranks = stay(self._loaded[1].sharded, comm, self.job.same_bits)
            self._loaded[1].speculate(self.job.speculation)
        else:
            self._packed_ranks = None
        self.comm = comm
        model = self.model(comm, self.job.dtypes)
        if self.conversation is not None and self.conversation.model is not model:  # this is another rank now
            self.conversation = Conversation(model)
        elif self.conversation is not None:
            self.conversation.forget_cache()

    def answer(
        self,
        ids: Sequence[int],
        *,
        warm_up: bool,
        on_text: Callable[[str], None] | None = None,
        on_token: Callable[[int], None] | None = None,
    ) -> Generation:
        """Answer on all ranks, in the conversation where there is one."""
        model = self.model(self.comm, self.job.dtypes)
        if warm_up:
            self._warm_up(model, ids)
        generate = model.generate if self.conversation is None else self.conversation.answer
        found = generate(ids, self.sampling, max_tokens=self.job.max_tokens, on_text=on_text, on_token=on_token)
        if self._recording is not None:
            about = {"model": self.job.model, "prompt": list(ids), "topology": self.comm.topology}
            self._recording.write(Path(self.job.xray), found, order=self.comm.order, **about)
            self._recording.stop()
            self._recording = None
        return found

    def reports(self, found: Generation) -> list[Report]:
        """What every rank says of an answer, by rank, on the head rank; nothing elsewhere. A collective."""
        return self._reports(self.comm, self.job.dtypes, self.model(self.comm, self.job.dtypes), found)

    def again(self, ids: Sequence[int], comm: Comm, dtypes: tuple[str, ...]) -> tuple[Generation, list[Report]]:
        """Generate the same on another group, or in other dtypes, for comparison."""
        model = self.model(comm, dtypes)
        self._warm_up(model, ids)
        found = model.generate(ids, self.sampling, max_tokens=self.job.max_tokens)
        return found, self._reports(comm, dtypes, model, found)

    def _warm_up(self, model: Model, ids: Sequence[int]) -> None:
        model.generate(ids, self.sampling, max_tokens=_WARM_UP_TOKENS)

    def _reports(self, comm: Comm, dtypes: tuple[str, ...], model: Model, found: Generation) -> list[Report]:
        part = model.sharded
        own = {"rank": comm.rank, "dtype": computes_in(model, dtypes[comm.rank]), "device": str(part.forward.device)}
        loaded = {"bytes_held": part.forward.nbytes_held, "bytes_read": model.bytes_read, "load_s": model.load_s}
        if isinstance(part.forward, StagedForward):
            own["stage"] = part.forward.stage.number
        elif isinstance(part.forward, HandoverForward | RowsForward):
            own["stage"] = comm.rank  # has computed other rows than the other rank
        return gather(comm, {**own, **loaded, "compiled": part.forward.compiled, **found.stats.as_dict()})


def computes_in(model: Model, dtype: str) -> str:
    """What this rank computes in, for people: a packed rank has no use for its dtype."""
    return "packed" if model.sharded.forward.compute == "packed" else dtype


def gather(comm: Comm, report: Report) -> list[Report]:
    """The reports of all ranks, by rank, on the head rank; nothing elsewhere."""
    payloads = comm.gather_bytes(json.dumps(report).encode())
    return [json.loads(payload) for payload in payloads] if comm.rank == HEAD_RANK else []
