"""Records one generation stage by stage: the residual stream, every sum that was added to it, and the logits."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from hostring.integrations.llm.request import HEAD_RANK

if TYPE_CHECKING:
    from hostring.integrations.llm.generate import Model
    from hostring.integrations.llm.generation import Generation

FORMAT = "hostring xray 1"

MAX_ROUNDING = 1e-5  # of a stream's norm: what adding sums up again, in float64, may be off by
NEAR = 1e-2  # how near what is missing from a stream must be to a sum, to be that sum

Floats = npt.NDArray[np.float32]


class Recording:
    """Watches a model's generations and keeps the last one, on every rank. It costs a copy of every stage.

    The model must have been loaded with hash_activations=True.

    Attributes:
        steps: of each forward pass, the stages in order, each of shape (rows, hidden): the embedding, two sums per
            layer, the stream at the end.
        logits: of each step, shape (vocabulary,); on the head rank only.
    """

    def __init__(self, model: Model) -> None:
        audit = model.sharded.reducer.audit
        if audit is None:
            raise ValueError("a model is recorded that was loaded with hash_activations=True")
        self._model, self._hashed = model, model.hash_logits
        self.steps: list[list[Floats]] = []
        self.logits: list[Floats] = []
        self._brought: list[list[Floats]] = []  # of each step, what this rank brought to the sums
        reducer = model.sharded.reducer
        self._group = reducer.comm
        if self._group is not model.comm:
            raise ValueError("a pipeline's stages are not recorded: each holds other layers; leave --xray or pp= out")
        reducer.comm = _Brought(self._group, self._bring)
        audit.on_stage, model.on_logits, model.hash_logits = self._stage, self._logits, True

    def _stage(self, kind: str, values: Tensor | None) -> None:
        if values is None:  # a generation begins
            self.steps, self.logits, self._brought = [], [], []
            return
        if kind == "begin":
            self.steps.append([])
            self._brought.append([])
        width = values.shape[-1]
        self.steps[-1].append(values.detach().cpu().numpy().reshape(-1, width).astype(np.float32, copy=True))

    def _bring(self, partial: Any) -> None:
        """A partial sum, or several whose sum it is, shape (…, rows, hidden)."""
        if self.steps:  # else it belongs to no step
            values = torch.as_tensor(partial).detach().cpu().numpy()
            self._brought[-1].append(values.reshape(-1, *self.steps[-1][0].shape).sum(0, dtype=np.float32))

    def _logits(self, whole: Floats) -> None:
        self.logits.append(whole.reshape(-1).copy())

    def stop(self) -> None:
        """Watch no more."""
        audit = self._model.sharded.reducer.audit
        assert audit is not None
        self._model.sharded.reducer.comm = self._group
        audit.on_stage, self._model.on_logits, self._model.hash_logits = None, None, self._hashed

    def write(self, file: Path, found: Generation, **about: Any) -> None:
        """Write what was recorded, on the head rank. A collective."""
        comm, sharded = self._model.comm, self._model.sharded
        unused = [why for n in range(len(self.steps)) for why in self._unused(n)]
        own = {"stages": self._hashes(), "unused": unused, "weights": weight_hashes(getattr(sharded, "decoder", None))}
        told = comm.gather_bytes(json.dumps(own).encode())
        if comm.rank != HEAD_RANK:
            return
        header = {
            "format": FORMAT,
            "ranks": comm.world_size,
            "layers": sharded.config.num_hidden_layers,
            "plan": {name: list(getattr(sharded.plan, name)) for name in ("kv_groups", "columns", "vocab")},
            "tokens": found.tokens,
            "per_rank": [json.loads(one) for one in told],
            **about,
        }
        arrays = {f"step{n}": np.stack(stages) for n, stages in enumerate(self.steps)}
        arrays |= {f"logits{n}": logits for n, logits in enumerate(self.logits)}
        encoded = np.frombuffer(json.dumps(header).encode(), np.uint8)
        with file.open("wb") as out:
            np.savez(out, header=encoded, **arrays)  # type: ignore[arg-type]

    def _unused(self, step: int) -> Iterator[tuple[int, int | None]]:
        """Step and number of the sum that this rank had, and did not add to its stream; None where none explains it."""
        begin, *sums, end = (stage.astype(np.float64) for stage in self.steps[step])
        missing = begin + np.sum(sums, 0) - end
        size = np.linalg.norm(missing)
        if size <= MAX_ROUNDING * np.linalg.norm(end):
            return
        partials = self._brought[step] if len(self._brought[step]) == len(sums) else [0.0] * len(sums)
        pairs = zip(sums, partials, strict=True)
        guesses = [min(np.linalg.norm(missing - s + p), np.linalg.norm(missing - s)) for s, p in pairs]
        nearest = int(np.argmin(guesses))
        yield step, nearest if guesses[nearest] < NEAR * size else None

    def _hashes(self) -> list[list[str]]:
        """Of this rank's stages, by step."""
        return [[hashlib.sha256(stage.tobytes()).hexdigest()[:16] for stage in stages] for stages in self.steps]


class _Brought:
    """Stands in for the group: shows what is brought to an all-reduce."""

    def __init__(self, comm: Any, show: Callable[[Any], None]) -> None:
        self._comm, self._show = comm, show

    def all_reduce(self, x: Any, /) -> Any:
        self._show(x)
        return self._comm.all_reduce(x)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._comm, name)


def weight_hashes(decoder: Any) -> dict[str, str]:
    """sha256 of each weight that this rank holds, by name, where they are torch's: packed ones are the file's bytes."""
    if not isinstance(decoder, nn.Module):
        return {}
    return {name: _sha256(weight.detach()) for name, weight in decoder.named_parameters()}


def _sha256(weight: Tensor) -> str:
    values = weight.contiguous().cpu().flatten().view(torch.uint8)
    return hashlib.sha256(values.numpy().data).hexdigest()
