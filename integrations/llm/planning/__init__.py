"""Plans that are measured: who holds what of a model, what it should cost, and what can't work.

May import: everything below `demo` beside it. What reads a model's header only imports no torch.
"""
