"""What holds for all sources: imports run downwards only and without circles, and packages are what they say."""

from __future__ import annotations

import ast
import re
from itertools import chain

import pytest
from source_tree import LINKED, ROOT, SOURCES, imported, ours, tree

try:
    import tomllib
except ModuleNotFoundError:  # Python 3.10
    tomllib = pytest.importorskip("tomli")


LAYERS = (
    ("errors", "torch_hook", "platforms"),
    ("arrays", "transports", "command_line"),
    ("topologies", "store"),
    ("group",),
    ("engine",),
    ("cost", "tracing"),
    ("tuning", "launch", "shipping"),
    ("comm",),
    ("rendezvous", "late_comm"),
    ("",),  # hostring/__init__.py
    ("bench", "integrations", "training"),
    ("commands",),
    ("__main__",),
)
"""Folders and top-level modules below `hostring`, the lowest first.

Each imports what stands before its own line only.
"""

MODEL_LAYERS = (
    ("model",),
    ("checkpoint",),
    ("request", "sharded", "packed", "stats", "agreement", "pipeline", "context"),
    ("same_bits", "handover", "rows"),
    ("compute",),
    ("planning",),
    ("prefix", "regroup"),
    ("speculation",),
    ("generation",),
    ("generate", "spans"),
    ("conversation", "xray"),
    ("demo",),
    ("evidence",),
    ("serve",),
    ("",),
)
"""The same inside `integrations/llm`."""


def texts(module: str) -> set[str]:
    return {
        node.value for node in ast.walk(tree(module)) if isinstance(node, ast.Constant) and isinstance(node.value, str)
    }


def arrows_not_downwards(
    layers: tuple[tuple[str, ...], ...], prefix: str, imports: dict[str, frozenset[str]]
) -> set[str]:
    """Imports that don't lead to a lower layer, but for those within one folder."""
    height = {name: n for n, layer in enumerate(layers) for name in layer}
    wrong = set()
    for module, names in imports.items():
        if module != prefix.rstrip(".") and not module.startswith(prefix):
            continue
        home = module.removeprefix(prefix.rstrip(".")).lstrip(".").split(".")[0]
        for name in names:
            if name != prefix.rstrip(".") and not name.startswith(prefix):
                continue
            there = name.removeprefix(prefix.rstrip(".")).lstrip(".").split(".")[0]
            if there != home and height[there] >= height[home]:
                wrong.add(f"{module} imports {name}")
    return wrong


def circles(imports: dict[str, frozenset[str]]) -> list[list[str]]:
    """Groups of modules that import each other, directly or through others (Tarjan's strongly connected components)."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found: list[list[str]] = []

    def visit(module: str) -> None:
        index[module] = low[module] = len(index)
        stack.append(module)
        for name in imports.get(module, ()):
            if name not in index:
                visit(name)
                low[module] = min(low[module], low[name])
            elif name in stack:
                low[module] = min(low[module], index[name])
        if low[module] == index[module]:
            group = stack[stack.index(module) :]
            del stack[stack.index(module) :]
            if len(group) > 1:
                found.append(sorted(group))

    for module in imports:
        if module not in index:
            visit(module)
    return found


def all_imports() -> dict[str, frozenset[str]]:
    return {module: ours(module) for module in SOURCES}


def test_the_sources_are_found():
    assert {"comm", "topologies.mesh", "transports.tcp", "integrations.llm.model.qwen", ""} <= set(SOURCES)
    assert "engine.engine" in ours("engine.session")
    assert ours("topologies.mesh") == {"topologies.schedule", "topologies.collectives", "topologies.routes"}
    assert {name.split(".")[0] for name in SOURCES} == set(chain.from_iterable(LAYERS))


def test_imports_run_downwards_only():
    assert not arrows_not_downwards(LAYERS, "", all_imports())
    assert not arrows_not_downwards(MODEL_LAYERS, "integrations.llm.", all_imports())


def test_no_modules_import_each_other():
    """At their top, inside functions, or for type checkers alone. A package's `__init__` may name its own modules."""
    imports = {m: frozenset(n for n in names if not n.startswith(f"{m}.")) for m, names in all_imports().items() if m}
    assert not circles(imports)


def test_a_circle_and_an_upward_arrow_are_noticed():
    imports = {**all_imports(), "errors": frozenset({"comm"})}
    assert any({"comm", "errors"} <= set(group) for group in circles(imports))
    assert "errors imports comm" in arrows_not_downwards(LAYERS, "", imports)
    inside = {"integrations.llm.model.qwen": frozenset({"integrations.llm.checkpoint.layout"})}
    assert arrows_not_downwards(MODEL_LAYERS, "integrations.llm.", inside)


def test_core_imports_no_torch():
    """Nowhere at the top of a module.

    Inside a function: only to read torch's own store, and to measure torch itself.
    """
    inside = set()
    for module in SOURCES:
        if module.startswith("integrations"):
            continue
        at_top = [node for node in tree(module).body if isinstance(node, ast.Import | ast.ImportFrom)]
        top = {a.name for n in at_top if isinstance(n, ast.Import) for a in n.names} | {
            n.module or "" for n in at_top if isinstance(n, ast.ImportFrom)
        }
        assert not {n for n in top if n.split(".")[0] in ("torch", "transformers")}, module
        if any(n.split(".")[0] == "torch" for n in imported(module)):
            inside.add(module.split(".")[0])
    assert inside <= {"store", "bench"}


def test_integrations_use_the_public_api():
    """And `launch`, which starts processes, `shipping`, which sends files, and `group.environment`, which reads what
    launchers say.
    """
    public = {node.value for node in ast.walk(tree("")) if isinstance(node, ast.Constant)}
    for module in SOURCES:
        if module.startswith("integrations"):
            inner = {n for n in ours(module) if n and not n.startswith("integrations")}
            assert {n for n in inner if not n.startswith(("launch.", "shipping."))} <= {"group.environment"}, module
            named = {n.removeprefix("hostring.") for n in imported(module) if n.startswith("hostring.")}
            assert {n.split(".")[0] for n in named} <= public | {"launch", "shipping", "group", "integrations"}, module


def test_integrations_are_named_only_where_people_ask_for_them():
    named = {m.split(".")[0] for m in SOURCES if any(re.match(r"hostring\.integrations\b", text) for text in texts(m))}
    assert named - {"integrations"} <= {"commands", "torch_hook"}


def test_nobody_imports_the_top_folders_by_their_bare_names():
    for module in SOURCES:
        assert not {n for n in imported(module) if n.split(".")[0] in LINKED}, module


def test_every_folder_says_what_lives_there():
    for module, file in SOURCES.items():
        if file.name == "__init__.py":
            assert ast.get_docstring(tree(module)), file


def test_the_wheel_lists_every_package():
    setup = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["setuptools"]
    on_disk = {".".join(("hostring", *filter(None, [m]))) for m, file in SOURCES.items() if file.name == "__init__.py"}
    assert set(setup["packages"]) == on_disk
    links = {f"hostring.{name}": name for name in LINKED}
    assert setup["package-dir"] == {"hostring": "hostring", **links}


def test_every_folder_of_sources_is_a_package():
    for file in SOURCES.values():
        assert (file.parent / "__init__.py").exists(), file


def test_the_links_in_the_checkout_lead_to_the_top_folders():
    for name, folder in LINKED.items():
        link = ROOT / "hostring" / name
        assert link.is_symlink()
        assert not link.readlink().is_absolute()
        assert link.resolve() == folder.resolve()


def test_a_second_copy_of_a_top_folder_is_refused(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT))
    for name in LINKED:
        with pytest.raises(ImportError, match=f"hostring.{name}"):
            __import__(name)
