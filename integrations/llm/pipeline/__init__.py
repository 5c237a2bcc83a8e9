"""Pipeline stages: contiguous layers on each group of ranks, and one activation tensor over each boundary.

May import `integrations.llm.model` and `integrations.llm.checkpoint`. The model knows nothing of it.
"""
