"""What the demo is asked to do, as plain values that travel to the rank processes."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

BUNDLED = Path(__file__).parent / "tiny"
DTYPE_NAMES = ("float16", "bfloat16", "float32")
_SHORT = {"f16": "float16", "fp16": "float16", "bf16": "bfloat16", "f32": "float32", "fp32": "float32"}


@dataclass(frozen=True)
class Job:
    """One generation to run and to measure.

    Attributes:
        model: a GGUF file or a directory in Hugging Face form.
        dtypes: what each rank computes in.
        prompt: None for one that suits the model.
        max_tokens, temperature, top_k, top_p, seed: see `Sampling`.
        controls: also run on one rank alone, and on all ranks with one dtype.
    """

    model: str
    dtypes: tuple[str, ...]
    prompt: str | None
    max_tokens: int
    temperature: float
    top_k: int
    top_p: float
    seed: int
    controls: bool

    @property
    def ranks(self) -> int:
        return len(self.dtypes)

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @staticmethod
    def from_json(text: str) -> Job:
        fields = json.loads(text)
        return Job(**{**fields, "dtypes": tuple(fields["dtypes"])})


def make_job(*, model: str | None, ranks: int | None, dtypes: str | None, **rest: Any) -> Job:
    """Complete and check what the user said, before any process starts.

    Args:
        model: the bundled model when None.
        ranks: 2, or as many as `dtypes` names, when None.
        dtypes: names separated by commas: one for all ranks, or one per rank. float16 and bfloat16 in turn when None.
        rest: the other attributes of `Job`.

    Raises:
        ValueError: names that are unknown, or numbers that don't go together.
        FileNotFoundError: no such model.
    """
    path = BUNDLED if model is None else Path(model)
    if not path.exists():
        raise FileNotFoundError(f"no model at {path}; give a GGUF file or a directory with config.json and model.safetensors")
    if ranks is not None and ranks < 1:
        raise ValueError(f"{ranks} ranks: at least one is needed")
    return Job(str(path.absolute()), _dtypes(ranks, dtypes), **rest)


def _dtypes(ranks: int | None, text: str | None) -> tuple[str, ...]:
    if text is None:
        return tuple(DTYPE_NAMES[rank % 2] for rank in range(ranks or 2))
    names = [_SHORT.get(name.strip(), name.strip()) for name in text.split(",")]
    unknown = [name for name in names if name not in DTYPE_NAMES]
    if unknown:
        raise ValueError(f"dtype {unknown[0]!r} is not one of {', '.join(DTYPE_NAMES)}")
    if len(names) == 1:
        names *= ranks or 2
    if ranks is not None and len(names) != ranks:
        raise ValueError(f"{len(names)} dtypes for {ranks} ranks; name one for all, or one per rank")
    return tuple(names)
