"""Arrays on the host: dtypes and their codes, casts, the fold, 8-bit blocks, and staging to and from any library or device.

May import: `hostring.errors`.
"""
