"""pytest benchmarks/test_staging.py: staging arrays as float32 and bringing them back, on one thread."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

from hostring.arrays.staging import adapter_for

SIZES = (16 << 10, 256 << 10, 8 << 20)  # bytes on the wire


def arrays(n_elements: int) -> dict[str, Any]:
    import torch

    torch.set_num_threads(1)
    return {
        "numpy float16": np.ones(n_elements, np.float16),
        "numpy bfloat16": np.ones(n_elements, ml_dtypes.bfloat16),
        "torch float16": torch.ones(n_elements, dtype=torch.float16),
        "torch bfloat16": torch.ones(n_elements, dtype=torch.bfloat16),
    }


@pytest.mark.parametrize("nbytes", SIZES)
@pytest.mark.parametrize("kind", list(arrays(1)))
def test_stage(benchmark: Any, kind: str, nbytes: int) -> None:
    x, host = arrays(nbytes // 4)[kind], np.zeros(nbytes // 4, np.float32)
    benchmark(adapter_for(x).stage, x, host)
    assert host[-1] == 1.0


@pytest.mark.parametrize("nbytes", SIZES)
@pytest.mark.parametrize("kind", list(arrays(1)))
def test_unstage(benchmark: Any, kind: str, nbytes: int) -> None:
    x, host = arrays(nbytes // 4)[kind], np.full(nbytes // 4, 2.0, np.float32)
    benchmark(adapter_for(x).unstage, host, x)
    assert float(x[-1]) == 2.0
