"""Which schedule for which size: measures links, tries schedules, saves tables, and makes all ranks agree on one.

May import: `hostring.cost`, `hostring.engine`, and what those may import.
"""
