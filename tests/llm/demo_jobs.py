"""Short jobs for the demo, and their figures."""

from __future__ import annotations

from typing import Any

from ranks import in_threads

from hostring.integrations.llm.demo.job import BUNDLED, Job
from hostring.integrations.llm.demo.measure import measure

PROMPTS = ("In the beginning", "And God said unto them,")


def job(*prompts: str, **changes: Any) -> Job:
    common = {
        "dtypes": ("float32",) * 3,
        "max_tokens": 24,
        "temperature": 0.0,
        "top_k": 40,
        "top_p": 0.95,
        "seed": 5,
        "controls": False,
    }
    return Job(prompts=prompts, **{"model": str(BUNDLED), **common, **changes})


def silent(kind: str, value: Any) -> None:
    """Told by a rank whose words don't matter."""


def measured(what: Job) -> dict[str, Any]:
    """The figures of a run on ranks that are threads."""
    result = in_threads(what.ranks, lambda comm: measure(what, comm, silent))[0]
    assert isinstance(result, dict)
    return result
