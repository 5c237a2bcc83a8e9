"""Short jobs for the demo."""

from __future__ import annotations

from typing import Any

from hostring.integrations.llm.demo.job import BUNDLED, Job

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
    return Job(model=str(BUNDLED), prompts=prompts, **{**common, **changes})
