"""Processes of ranks: starts and watches them, joins machines by token, and checks the way between hosts.

May import: `hostring.group`, `hostring.store`, `hostring.transports`, `hostring.errors`.
"""
