"""Islands: groups of ranks that one library of their vendor's joins, and hostring between them.

`choice` reads what was asked for, `layout` says which ranks form an island, `setup` makes the groups, `library` calls
the library inside an island, `collectives` joins both levels, and `faults` names the culprit when either level fails.
"""
