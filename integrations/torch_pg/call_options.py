"""torch's option objects, read in hostring's words."""

from __future__ import annotations

from typing import Any

from torch._C import _distributed_c10d as c10d

PREMUL = "premul"
OPS = {
    hash(op): name
    for op, name in {
        c10d.ReduceOp.SUM: "sum",
        c10d.ReduceOp.AVG: "avg",
        c10d.ReduceOp.PRODUCT: "prod",
        c10d.ReduceOp.MIN: "min",
        c10d.ReduceOp.MAX: "max",
        c10d.ReduceOp.BAND: "band",
        c10d.ReduceOp.BOR: "bor",
        c10d.ReduceOp.BXOR: "bxor",
        c10d.ReduceOp.PREMUL_SUM: PREMUL,
    }.items()
}
"""Names by `hash(opts.reduceOp)`: a third of the cost of comparing operators."""


def factor(op: Any) -> Any:
    """The number or tensor by which PREMUL_SUM multiplies contributions."""
    return op.__getstate__()[1]


def given(kind: Any, opts: Any, **by_hand: Any) -> Any:
    """`opts` itself; or, for callers of torch's second form of a method, options of `kind` made from their arguments.

    Args:
        kind: a class of c10d options.
        opts: an instance of it; or None, or the first argument of the second form.
        by_hand: the arguments of that form in order, by their name in `kind`. None stands for the default.
    """
    if isinstance(opts, (kind, c10d.AllreduceCoalescedOptions)):  # which is no subclass
        return opts
    made = kind()
    if opts is not None:
        by_hand[next(iter(by_hand))] = opts
    for name, value in by_hand.items():
        if value is not None:
            setattr(
                made,
                name,
                c10d.ReduceOp(value) if name == "reduceOp" and not isinstance(value, c10d.ReduceOp) else value,
            )
    return made
