"""How each rank computes: with the file's own blocks ("packed"), or with dequantised weights ("exact"). All ranks
agree on it."""

from __future__ import annotations

import contextlib
import hashlib
import logging
from collections.abc import Callable, Sequence
from typing import Any, Final, TypeAlias

import numpy as np
import torch

from hostring import Comm
from hostring.integrations.llm.agreement import Able, ShareHashes, agree
from hostring.integrations.llm.checkpoint.checkpoint import Checkpoint
from hostring.integrations.llm.checkpoint.gguf_file import GgufCheckpoint
from hostring.integrations.llm.context.forward import ContextForward, share_context
from hostring.integrations.llm.context.plan import ContextPlan, why_not_shared
from hostring.integrations.llm.handover.forward import HandoverForward
from hostring.integrations.llm.handover.model import check_roles, handed_model, rejoin
from hostring.integrations.llm.handover.roles import Roles
from hostring.integrations.llm.model.local_model import LocalModel
from hostring.integrations.llm.model.shards import WHOLE, Ends, ShardPlan
from hostring.integrations.llm.packed.decoder import units_of
from hostring.integrations.llm.packed.library import Unavailable, load
from hostring.integrations.llm.packed.model import build_packed
from hostring.integrations.llm.packed.plan import UnitPlan
from hostring.integrations.llm.packed.weights import unsupported
from hostring.integrations.llm.pipeline.layers import layers_of
from hostring.integrations.llm.pipeline.staged import (
    StagedForward,
    head_rows,
    refuse_together,
    stage_group,
    staged_model,
)
from hostring.integrations.llm.pipeline.stages import StagePlan
from hostring.integrations.llm.rows.forward import RowsForward
from hostring.integrations.llm.rows.model import check_rows, divided_model
from hostring.integrations.llm.rows.plan import RowPlan, why_not_divided
from hostring.integrations.llm.same_bits import promise
from hostring.integrations.llm.sharded import build

log = logging.getLogger("hostring")

COMPUTES: Final = ("auto", "packed", "exact")
Plan: TypeAlias = ShardPlan | StagePlan | ContextPlan | Roles | RowPlan


def build_local(
    checkpoint: Checkpoint,
    comm: Comm,
    compute: str,
    device: torch.device,
    *,
    plan: Plan | None,
    max_seq: int | None,
    hash_activations: bool,
    compile: bool | str,
    packed_ranks: Sequence[bool] | None = None,
    same_bits: bool = False,
    **exact: Any,
) -> tuple[LocalModel, Sequence[bool]]:
    """This rank's part of the model, computed as `compute` says. A collective: every rank calls it; ranks may ask for
    other ways.

    Args:
        compute: "packed" multiplies by the blocks of a GGUF file as they are, with activations rounded to 8 bits in
            blocks of 32, as llama.cpp does; "exact" dequantises them. "auto" is packed where the rank can, and logs
        why it can't.
        plan: which shares each rank holds, see `sharded.build`; the stages of a pipeline; a grid of ranks that share
            their KV caches; who computes prompts and who decodes; or who computes which rows.
        max_seq, hash_activations, compile, exact: see `sharded.build`.
        packed_ranks: which ranks compute packed, where this group has agreed on it before: then this is no collective.
        same_bits: refuse what does not give the bits of any other number of ranks.

    Returns:
        the part, and which ranks compute packed.

    Raises:
        ValueError: there is no such way; or this rank, or another one, was told to compute packed and can't;
            or the same bits can't be promised.
    """
    wishes = {"max_seq": max_seq, "hash_activations": hash_activations, "compile": compile, **exact}
    if isinstance(plan, ContextPlan):
        return _build_on_grid(checkpoint, comm, compute, device, plan, same_bits=same_bits, **wishes)
    if isinstance(plan, StagePlan):
        return _build_stage(checkpoint, comm, compute, device, plan, same_bits=same_bits, **wishes)
    if isinstance(plan, Roles | RowPlan):
        return _build_whole(checkpoint, comm, compute, device, plan, same_bits=same_bits, **wishes)
    able = _able(checkpoint, compute, device, plan, comm.world_size, bool(compile))
    packed = agree(comm, able, _share_hashes(checkpoint, comm, able, plan)) if packed_ranks is None else packed_ranks
    if same_bits and packed_ranks is None:
        promise(comm, able.why_not)
    if any(packed) and plan is None and isinstance(checkpoint, GgufCheckpoint):
        plan = units_of(checkpoint).shares(checkpoint.config, comm.world_size)
    if not able.why_not:
        beside_exact, ends = not all(packed), exact.get("ends", WHOLE)
        options: dict[str, Any] = {"plan": plan, "max_seq": max_seq, "hash_activations": hash_activations, "ends": ends}
        return build_packed(checkpoint, comm, beside_exact=beside_exact, batch_invariant=same_bits, **options), packed
    if compute == "auto" and isinstance(checkpoint, GgufCheckpoint) and device.type == "cpu":
        log.warning("hostring: rank %d computes with dequantised weights: %s", comm.rank, able.why_not)
    return build(checkpoint, comm, plan=plan, device=device, **wishes), packed


def _build_on_grid(
    checkpoint: Checkpoint,
    comm: Comm,
    compute: str,
    device: torch.device,
    grid: ContextPlan,
    *,
    compile: bool | str,
    same_bits: bool,
    **wishes: Any,
) -> tuple[LocalModel, Sequence[bool]]:
    """This rank's part of a grid; what one rank refuses is refused on every rank."""
    why_not = why_not_shared(grid, comm.world_size, compute, compile=bool(compile), same_bits=same_bits)
    refuse_together(comm, why_not)
    part = build(checkpoint, comm, plan=grid.shares(checkpoint.config), device=device, **wishes)
    return share_context(part, grid), [False] * comm.world_size


def _build_stage(
    checkpoint: Checkpoint, comm: Comm, compute: str, device: torch.device, stages: StagePlan, **wishes: Any
) -> tuple[LocalModel, Sequence[bool]]:
    """This rank's stage. Ranks of a stage agree among themselves; what one of them refuses is refused on every rank."""
    stages.check(checkpoint.config, comm.world_size)
    stage, group, why = stages.of_rank(comm.rank), stage_group(comm, stages), ""
    layers = layers_of(checkpoint, stage.layers)
    try:
        part, packed = build_local(
            layers,
            group,
            compute,
            device,
            plan=None,
            ends=Ends(stage.is_first, stage.is_last),
            **wishes,
        )
    except ValueError as exc:
        why = str(exc) or "refused"
    refuse_together(comm, why)
    if wishes.get("same_bits"):  # each stage has promised it by itself
        promise(comm, "")
    checkpoint.bytes_read = layers.bytes_read
    return staged_model(part, comm, stages, checkpoint.config), _of_all_stages(comm, packed[group.rank])


def _build_whole(
    checkpoint: Checkpoint, comm: Comm, compute: str, device: torch.device, plan: Roles | RowPlan, **wishes: Any
) -> tuple[LocalModel, Sequence[bool]]:
    """The whole model on this rank, and what of each step it computes. What one rank refuses is refused on all."""
    same_bits = wishes.pop("same_bits")
    if isinstance(plan, RowPlan):
        compiles = bool(wishes["compile"])
        check_rows(comm, plan, why_not_divided(plan, comm.world_size, compute, compile=compiles, same_bits=same_bits))
        compute = "exact"
    group, why = _group_of_one(comm, plan), ""
    try:
        if same_bits:
            raise ValueError(
                "same bits can't be promised with prefill=RANK,decode=RANK: no rank has the logits of all steps, which "
                "are hashed; leave --same-bits out"
            )
        part, packed = build_local(
            checkpoint, group, compute, device, plan=None, **{**wishes, "replicate_embedding": True}
        )
    except ValueError as exc:
        why = str(exc) or "refused"
    refuse_together(comm, why)
    if isinstance(plan, RowPlan):
        return divided_model(part, comm, plan), _of_all_stages(comm, packed[0])
    return handed_model(part, comm, plan), _of_all_stages(comm, packed[0])


def _group_of_one(comm: Comm, plan: Roles | RowPlan) -> Comm:
    """In which this rank holds the whole model. A collective."""
    if isinstance(plan, Roles):
        check_roles(comm, plan)
    group = comm.split(comm.rank)
    assert group is not None
    return group


def _of_all_stages(comm: Comm, packed: bool) -> Sequence[bool]:
    return [bool(way) for way in comm.all_gather(np.array([packed]))]


def stay(part: LocalModel, comm: Comm, same_bits: bool) -> Sequence[bool]:
    """Go on in a rebuilt group with the weights that are here, while a rank that came back loads. A collective: its
    calls are those of `build_local`, in the same order.

    Returns:
        which ranks compute packed.

    Raises:
        ValueError: this rank is another one there; or the rank that came back computes in another way than before.
    """
    if isinstance(part.forward, ContextForward):
        refuse_together(comm, "")  # as the rank does that loads
        part.move_to(comm)
        return [False] * comm.world_size
    part.move_to(comm)
    if isinstance(part.forward, StagedForward):
        inner, why = part.forward.inner, ""
        try:
            packed = _stay(inner, same_bits)
        except ValueError as exc:
            why = str(exc)
        refuse_together(comm, why)
        if same_bits:
            promise(comm, "")
        part.plan = head_rows(inner, comm, part.forward.stages)
        return _of_all_stages(comm, packed[inner.comm.rank])
    if isinstance(part.forward, HandoverForward):
        _group_of_one(comm, part.forward.roles).close()  # what a rank that loads takes part in; this one has its own
        refuse_together(comm, "")
        rejoin(part.forward)
        return _of_all_stages(comm, part.forward.compute == "packed")
    if isinstance(part.forward, RowsForward):
        check_rows(comm, part.forward.plan)
        _group_of_one(comm, part.forward.plan).close()
        refuse_together(comm, "")
        return _of_all_stages(comm, False)
    return _stay(part, same_bits)


def _stay(part: LocalModel, same_bits: bool) -> Sequence[bool]:
    why_not, borders = "it has dequantised its weights", ""
    if part.forward.compute == "packed":
        why_not, borders = "", _hash_of(part.decoder.units)
    ways = agree(part.comm, Able(why_not, False), ShareHashes(part.plan.sha256, part.plan.sha256, borders))
    if not why_not and part.decoder.beside_exact == all(ways):
        raise ValueError(f"packed are now the ranks {[r for r, w in enumerate(ways) if w]}; load the model again")
    if same_bits:
        promise(part.comm, why_not)
    return ways


def _share_hashes(checkpoint: Checkpoint, comm: Comm, able: Able, plan: ShardPlan | None) -> ShareHashes:
    """Hashes of this rank's plan, whichever way the ranks agree on."""
    exact = _even_plan(lambda: ShardPlan.balanced(checkpoint.config, comm.world_size)) if plan is None else plan
    packed, borders = exact, ""
    if isinstance(checkpoint, GgufCheckpoint) and (plan is None or not able.why_not):
        with contextlib.suppress(ValueError):  # its columns are not whole blocks
            units = units_of(checkpoint)
            packed = _even_plan(lambda: units.shares(checkpoint.config, comm.world_size)) if plan is None else plan
            borders = "" if able.why_not else _hash_of(units)
    return ShareHashes(exact.sha256 if exact else "", packed.sha256 if packed else "", borders)


def _even_plan(make: Callable[[], ShardPlan]) -> ShardPlan | None:
    """None where it can't be made; whoever needs it says why."""
    try:
        return make()
    except ValueError:
        return None


def _hash_of(units: UnitPlan) -> str:
    return hashlib.sha256(repr(units).encode()).hexdigest()


def _able(
    checkpoint: Checkpoint,
    compute: str,
    device: torch.device,
    plan: ShardPlan | None,
    world_size: int,
    compiles: bool,
) -> Able:
    if compute not in COMPUTES:
        raise ValueError(f"compute={compute!r} is not one of {', '.join(COMPUTES)}")
    asked_for = compute == "packed"
    if compute == "exact":
        return Able("it was told to compute exact", False)
    if device.type != "cpu":
        return Able(f"its weights are on {device}; packed kernels run on the CPU", asked_for)
    if compiles:
        return Able("it was told to compile, and torch compiles exact compute only", asked_for)
    if not isinstance(checkpoint, GgufCheckpoint):
        return Able("only GGUF files hold weights that can be decoded packed", asked_for)
    try:
        units = units_of(checkpoint)
        plan = units.shares(checkpoint.config, world_size) if plan is None else plan
        units.groups_per_rank(plan), units.columns_per_rank(plan)
        load()
    except (ValueError, Unavailable) as exc:
        return Able(str(exc), asked_for)
    return Able(unsupported(checkpoint.config, checkpoint.tensors), asked_for)
