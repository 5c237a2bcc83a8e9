"""The key-value store through which ranks find each other: its protocol, client, server, and the stores of others.

May import: `hostring.transports`, `hostring.errors`.
"""
