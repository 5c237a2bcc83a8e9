"""One call, from its array to its bytes: which schedule, bound to which links, run in rounds under one deadline.

May import: `hostring.group`, `hostring.topologies`, `hostring.arrays`, and what those may import.
"""
