"""How a group forms: configuration, rendezvous, handshake, links between all ranks, and rebuilding after a failure.

May import: `hostring.store`, `hostring.transports`, `hostring.errors`.
"""
