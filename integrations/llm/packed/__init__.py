"""Decoding with the blocks of a GGUF file as they are: ggml's kernels, driven from Python, one graph between two
reductions.

May import: `model` and `checkpoint` beside it.
"""
