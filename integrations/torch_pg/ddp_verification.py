"""DDP's comparison of parameter shapes: every rank learns which rank differs from rank 0.

torch alone raises only on the rank that differs. Rank 0 goes on, and fails later or never.
"""

from __future__ import annotations

from typing import Any

from torch import distributed

from hostring import HostringError
from hostring.integrations.torch_pg.process_group import ProcessGroup


def tell_all_ranks() -> None:
    """Let all ranks of a hostring group exchange the outcome of the comparison: one small collective for each DDP."""
    names: Any = distributed
    verify = names._verify_params_across_processes  # noqa: SLF001 - DDP looks it up by this name

    def verify_on_all_ranks(group: Any, params: Any, logger: Any = None) -> None:
        if not isinstance(group, ProcessGroup):
            verify(group, params, logger)
            return
        error: RuntimeError | None = None
        try:
            verify(group, params, logger)
        except HostringError:
            raise
        except RuntimeError as exc:
            error = exc
        verdicts = group.comm.gather_bytes(b"" if error is None else str(error).encode())
        if error is not None:
            raise error
        for rank, verdict in enumerate(verdicts):
            if verdict:
                raise RuntimeError(f"DDP: rank {rank} brought other parameters: {verdict.decode()}")

    names._verify_params_across_processes = verify_on_all_ranks  # noqa: SLF001
