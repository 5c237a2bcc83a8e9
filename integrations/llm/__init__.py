"""One decoder model over unlike ranks: sharded weights, two reductions per layer, one deciding head rank.

    model = load_model("SmolLM2-135M-Instruct.Q4_1.gguf", hostring.init(), dtype="bfloat16")
    print(model.generate("What is a ring?").text)

Names are imported when first used, so that reading the header of a checkpoint needs no torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hostring.integrations.llm.context.plan import ContextPlan
    from hostring.integrations.llm.conversation import Conversation
    from hostring.integrations.llm.generate import Model, load_model
    from hostring.integrations.llm.generation import Generation
    from hostring.integrations.llm.model.config import ModelConfig
    from hostring.integrations.llm.model.local_model import LocalModel
    from hostring.integrations.llm.model.sampling import Sampling
    from hostring.integrations.llm.model.shards import ShardPlan
    from hostring.integrations.llm.pipeline.stages import StagePlan
    from hostring.integrations.llm.rows.plan import RowPlan
    from hostring.integrations.llm.sharded import parallelize
    from hostring.integrations.llm.stats import Stats

_HOMES = {
    "ContextPlan": "context.plan",
    "Conversation": "conversation",
    "Generation": "generate",
    "LocalModel": "model.local_model",
    "Model": "generate",
    "ModelConfig": "model.config",
    "RowPlan": "rows.plan",
    "Sampling": "model.sampling",
    "ShardPlan": "model.shards",
    "StagePlan": "pipeline.stages",
    "Stats": "stats",
    "load_model": "generate",
    "parallelize": "sharded",
}
__all__ = [
    "ContextPlan",
    "Conversation",
    "Generation",
    "LocalModel",
    "Model",
    "ModelConfig",
    "RowPlan",
    "Sampling",
    "ShardPlan",
    "StagePlan",
    "Stats",
    "load_model",
    "parallelize",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
