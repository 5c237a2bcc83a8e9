"""Two recordings side by side: how far apart each stage is, and which layer and operation is the first to part."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

FORMAT = "hostring xray 1"
TOP = 16

Floats = npt.NDArray[np.float32]


@dataclass(frozen=True)
class Stage:
    """One stage of one step. `layer` is None for the embedding, the end of the stream and the head."""

    step: int
    layer: int | None
    operation: str

    def __str__(self) -> str:
        where = self.operation if self.layer is None else f"layer {self.layer}, {self.operation}"
        return f"{where} (step {self.step}, {'prefill' if self.step == 0 else 'decode'})"


@dataclass(frozen=True)
class Difference:
    """How far apart a stage of two runs is.

    Attributes:
        max_abs: the largest difference. relative: of the norms of all differences and of the stage.
        cosine: of the stages as vectors.
        top1, top16: of the last row, whether the largest element is the same, and how many of the largest 16 are.
    """

    stage: Stage
    max_abs: float
    relative: float
    cosine: float
    top1: bool
    top16: int

    def as_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return asdict(self)


@dataclass
class Run:
    """A recording that was read."""

    file: str
    header: dict[str, Any]
    arrays: dict[str, Floats]

    @staticmethod
    def read(file: Path) -> Run:
        """Raises: ValueError, when the file is no recording."""
        try:
            with np.load(file, allow_pickle=False) as stored:
                arrays = {name: stored[name] for name in stored.files}
            header = json.loads(arrays.pop("header").tobytes())
            if header["format"] != FORMAT:
                raise ValueError(f"its format is {header['format']!r}")
        except (ValueError, KeyError, OSError) as exc:
            if isinstance(exc, FileNotFoundError):
                raise
            raise ValueError(f"{file} is no recording of a run ({exc}); make one with --xray FILE") from exc
        return Run(str(file), header, arrays)

    def stages(self, step: int) -> list[tuple[Stage, Floats]]:
        """The stages of a step, in order. Where sums are missing, the last are zeros: they are named by their place."""
        values = self.arrays[f"step{step}"]
        names = [Stage(step, None, "embedding"), *(sum_of(step, n) for n in range(2 * self.header["layers"]))]
        sums = [*values[:-1], *[np.zeros_like(values[0])] * (len(names) - len(values) + 1)]
        found = [*zip(names, sums, strict=True), (Stage(step, None, "residual stream"), values[-1])]
        logits = self.arrays.get(f"logits{step}")
        return found if logits is None else [*found, (Stage(step, None, "logits"), logits[None])]

    @property
    def n_steps(self) -> int:
        return sum(name.startswith("step") for name in self.arrays)

    def faults(self) -> list[str]:
        """What is wrong with the run by itself: sums that are missing or were not used, and ranks that disagree."""
        return [*self._bypasses(), *self._disagreements()]

    def _bypasses(self) -> Iterator[str]:
        wanted = 2 * self.header["layers"]
        for step in range(self.n_steps):
            if (sums := len(self.arrays[f"step{step}"]) - 2) != wanted:
                yield f"step {step} has {sums} reductions, {wanted} were expected"
        for rank, own in enumerate(self.header["per_rank"]):
            for step, number in own["unused"]:
                if number is not None:
                    yield f"rank {rank}: {sum_of(step, number)}: the result of the reduction was not used"
                else:
                    yield f"rank {rank}: the stream of step {step} is not the sum of what was reduced"

    def _disagreements(self) -> Iterator[str]:
        for rank, own in enumerate(self.header["per_rank"][1:], 1):
            for step, (ours, theirs) in enumerate(
                zip(self.header["per_rank"][0]["stages"], own["stages"], strict=False)
            ):
                parted = next((n for n, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b), None)
                if parted is not None:
                    yield f"rank {rank} parts from rank 0 at {self.stages(step)[parted][0]}"
                    break


def sum_of(step: int, n: int) -> Stage:
    """The n-th reduction of a step."""
    return Stage(step, n // 2, ("attention", "MLP")[n % 2])


def differences(a: Run, b: Run) -> list[Difference]:
    """Every stage that both runs have, in order, up to the step where their tokens part.

    Raises:
        ValueError: they are not runs of one model with one prompt.
    """
    for what in ("layers", "prompt"):
        if a.header.get(what) != b.header.get(what):
            raise ValueError(f"{a.file} and {b.file} have another {what}; record both with one model and one prompt")
    found = []
    for step in range(common_steps(a, b)):
        for (stage, ours), (_, theirs) in zip(a.stages(step), b.stages(step), strict=False):
            found.append(_difference(stage, ours, theirs))
    return found


def common_steps(a: Run, b: Run) -> int:
    """Steps that had the same tokens as input: one more than the tokens in common."""
    ours, theirs = a.header["tokens"], b.header["tokens"]
    same = next((n for n, (x, y) in enumerate(zip(ours, theirs, strict=False)) if x != y), min(len(ours), len(theirs)))
    return min(same + 1, a.n_steps, b.n_steps)


def _difference(stage: Stage, ours: Floats, theirs: Floats) -> Difference:
    x, y = ours.astype(np.float64), theirs.astype(np.float64)
    apart, norm = np.abs(x - y), np.linalg.norm(y)
    product = np.linalg.norm(x) * norm
    relative = float(np.linalg.norm(apart) / norm) if norm else float(np.linalg.norm(apart) > 0)
    last = [np.argsort(-(v if stage.operation == "logits" else np.abs(v)), kind="stable")[:TOP] for v in (x[-1], y[-1])]
    return Difference(
        stage,
        float(apart.max(initial=0.0)),
        relative,
        float((x * y).sum() / product) if product else 1.0,
        bool(last[0][0] == last[1][0]),
        len(set(last[0].tolist()) & set(last[1].tolist())),
    )


def first_beyond(found: Sequence[Difference], tolerance: float) -> Difference | None:
    """The first stage that is further apart than `tolerance` of its norm; for 0, in any bit."""
    return next((d for d in found if d.max_abs > 0 and not d.relative <= tolerance), None)


def other_weights(a: Run, b: Run) -> list[str]:
    """Weights that differ, by rank and name, where both runs hold the same shares in the same way."""
    if a.header["plan"] != b.header["plan"]:
        return []
    found = []
    for rank, (ours, theirs) in enumerate(zip(a.header["per_rank"], b.header["per_rank"], strict=True)):
        for name in ours["weights"]:
            if theirs["weights"].get(name, ours["weights"][name]) != ours["weights"][name]:
                found.append(f"rank {rank}: {name}")
    return found
