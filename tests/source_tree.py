"""The sources of hostring, parsed, and what each of them imports."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parent.parent


LINKED = {"transports": ROOT / "transports", "integrations": ROOT / "integrations"}


def sources() -> dict[str, Path]:
    """Module name below `hostring` -> file. The two symlinks are followed by name."""
    found = {}
    for folder, prefix in ((ROOT / "hostring", ""), *((path, f"{name}.") for name, path in LINKED.items())):
        for file in folder.rglob("*.py"):
            parts = file.relative_to(folder).with_suffix("").parts
            if not prefix and parts[0] in LINKED:
                continue
            name = prefix + ".".join(p for p in parts if p != "__init__")
            found[name.rstrip(".")] = file
    return found


SOURCES = sources()


@cache
def tree(module: str) -> ast.Module:
    return ast.parse(SOURCES[module].read_text(encoding="utf-8"))


@cache
def imported(module: str) -> frozenset[str]:
    """Full names of what `module` imports, anywhere: at its top, inside functions, and for type checkers alone."""
    names: set[str] = set()
    for node in ast.walk(tree(module)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{module} imports relatively"
            names |= {node.module or ""} | {f"{node.module}.{alias.name}" for alias in node.names}
    return frozenset(names)


@cache
def ours(module: str) -> frozenset[str]:
    """The modules of hostring that `module` imports, without the prefix; of a package and its module, the module."""
    short = {name.removeprefix("hostring").lstrip(".") for name in imported(module) if name.split(".")[0] == "hostring"}
    found = {name for name in short if name in SOURCES}
    return frozenset(
        f for f in found if f != module and not any(g.startswith(f"{f}." if f else "") for g in found - {f})
    )
