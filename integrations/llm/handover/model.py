"""From a whole model on each of two ranks to one that they share by roles."""

from __future__ import annotations

import json
import weakref

from hostring import Comm
from hostring.integrations.llm.checkpoint.gguf_config import INTERLEAVED
from hostring.integrations.llm.handover.blocks import BlockFormat
from hostring.integrations.llm.handover.forward import HandoverForward
from hostring.integrations.llm.handover.roles import Roles
from hostring.integrations.llm.model.local_model import LocalModel
from hostring.integrations.llm.model.shards import ShardPlan
from hostring.integrations.llm.model.tensor_parallel import HiddenReducer


def check_roles(comm: Comm, roles: Roles) -> None:
    """A collective.

    Raises:
        ValueError: a rank was given other roles, or the group has more ranks; on every rank.
    """
    told = comm.gather_bytes(repr(roles).encode())
    if told[0] != told[-1]:
        raise ValueError("the ranks were given other roles; give all ranks the same --plan")
    roles.check(comm.world_size)


def handed_model(inner: LocalModel, comm: Comm, roles: Roles) -> LocalModel:
    """What a rank runs in a group of roles, made of the whole model that it holds. A collective.

    Args:
        inner: in a group of its own, which is closed with the model.
    """
    forms = _formats(inner, comm)
    reducer = HiddenReducer(comm, inner.config.hidden_size, inner.reducer.audit)
    reducer.clock = inner.reducer.clock
    forward = HandoverForward(inner, comm, roles, forms, reducer)
    _close_with(forward, inner.comm)
    plan = ShardPlan.copies(inner.config, comm.world_size)
    return LocalModel(forward, inner.config, plan, comm, reducer, inner.max_seq, forward.handing)


def rejoin(forward: HandoverForward) -> None:
    """Go on in the group to which `forward` has moved, with a rank that loads. A collective of it.

    Raises:
        ValueError: the other rank now computes in another way than before.
    """
    forms = _formats(forward.inner, forward.comm)
    if forms != list(forward.forms):
        raise ValueError(f"the ranks' keys and values travel as {forms} now, and as {forward.forms} before; load again")


def _close_with(forward: HandoverForward, group: Comm) -> None:
    weakref.finalize(forward, group.close).atexit = False  # the process ends all its links then


def _formats(inner: LocalModel, comm: Comm) -> list[BlockFormat]:
    told = comm.gather_bytes(json.dumps(_format_of(inner).as_json()).encode())
    return [BlockFormat(**json.loads(one)) for one in told]


def _format_of(inner: LocalModel) -> BlockFormat:
    """Packed ranks keep float16; exact ones compute keys and values in their dtype, whatever their cache keeps."""
    config, packed = inner.config, inner.forward.compute == "packed"
    dtype = "float16" if packed else str(inner.forward.dtype).removeprefix("torch.")
    pairs = packed and config.model_type in INTERLEAVED
    return BlockFormat(dtype, config.num_key_value_heads, config.head_dim, pairs)
