"""`hostring-bench`: how fast collectives are, in the manner of nccl-tests, and whether they are right."""

from __future__ import annotations


def main() -> None:
    """The console script."""
    from hostring.bench.cli import main as run

    run()
