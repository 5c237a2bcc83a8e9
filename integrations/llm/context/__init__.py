"""Attention over several ranks that share one KV cache by position: its plan, its cache, and the merge.

May import `integrations.llm.model` and `integrations.llm.checkpoint`. The model knows nothing of it.
"""
