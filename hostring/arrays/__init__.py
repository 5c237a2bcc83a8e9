"""Arrays on the host: dtypes and their codes, casts, the fold, 8-bit blocks, and one adapter for each array library.

May import: `hostring.errors`.
"""
