"""Who may import whom, read from the sources: the layers of the design hold, and the wheel holds every package."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

try:
    import tomllib
except ModuleNotFoundError:  # Python 3.10
    tomllib = pytest.importorskip("tomli")

ROOT = Path(__file__).parent.parent
LEAVES = {"errors", "link", "wire", "dtypes", "fold", "schedule", "work", "config"}
UNDER_LEAVES = {"addresses", "launchers", "blocks", "casting", "message", "network"}  # as bare as leaves: they may be imported by them
ON_LEAVES = {"certify", "price"}
TEXT = {"transports": ROOT / "transports", "integrations": ROOT / "integrations"}


def sources() -> dict[str, Path]:
    """Module name below `hostring` -> file. The two symlinks are followed by name."""
    found = {}
    for folder, prefix in ((ROOT / "hostring", ""), *((path, f"{name}.") for name, path in TEXT.items())):
        for file in folder.rglob("*.py"):
            parts = file.relative_to(folder).with_suffix("").parts
            if not prefix and parts[0] in TEXT:
                continue
            name = prefix + ".".join(p for p in parts if p != "__init__")
            found[name.rstrip(".")] = file
    return found


SOURCES = sources()


@cache
def tree(module: str) -> ast.Module:
    return ast.parse(SOURCES[module].read_text())


def loaded_at_once(module: ast.Module) -> Iterator[ast.stmt]:
    """The statements that run when the module is imported, outside functions; what only type checkers see doesn't."""
    for part in module.body:
        if not isinstance(part, ast.If):
            yield part
        elif not (isinstance(part.test, ast.Name) and part.test.id == "TYPE_CHECKING"):
            yield from part.body


def imported(module: str, *, everywhere: bool = True) -> set[str]:
    """Full names of what `module` imports; without `everywhere`, only what is imported when it is."""
    names: set[str] = set()
    file = SOURCES[module]
    package = ["hostring", *module.split(".")][: None if file.name == "__init__.py" else -1] if module else ["hostring"]
    for node in ast.walk(tree(module)) if everywhere else loaded_at_once(tree(module)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            stem = ".".join([*base, *([node.module] if node.module else [])])
            names |= {stem} | {f"{stem}.{alias.name}" for alias in node.names}
    return names


def ours(module: str) -> set[str]:
    """The modules of hostring that `module` imports, without the prefix."""
    short = {name.removeprefix("hostring").lstrip(".") for name in imported(module) if name.split(".")[0] == "hostring"}
    return {name for name in short if name in SOURCES} - {""}


def texts(module: str) -> set[str]:
    return {node.value for node in ast.walk(tree(module)) if isinstance(node, ast.Constant) and isinstance(node.value, str)}


def test_the_sources_are_found():
    assert {"comm", "topologies.mesh", "transports.tcp", "integrations.llm.qwen", ""} <= set(SOURCES)
    assert "engine" in ours("caller")
    assert ours("topologies.mesh") == {"schedule", "topologies.collectives", "topologies.graph"}


@pytest.mark.parametrize("module", sorted(LEAVES | UNDER_LEAVES))
def test_leaves_import_only_leaves(module):
    assert ours(module) <= LEAVES | UNDER_LEAVES


@pytest.mark.parametrize("module", sorted(ON_LEAVES | {m for m in SOURCES if m.startswith("topologies")}))
def test_topologies_and_what_is_proved_about_them_import_leaves(module):
    above = {name for name in ours(module) if not name.startswith("topologies")}
    assert above <= LEAVES | UNDER_LEAVES


def reachable(module: str) -> set[str]:
    seen, left = set(), [module]
    while left:
        for name in ours(left.pop()) - seen:
            seen.add(name)
            left.append(name)
    return seen


def test_the_engine_knows_no_topology_and_no_transport():
    known = reachable("engine")
    assert {"link", "program", "schedule"} <= known
    assert not {name for name in known if name.split(".")[0] in ("topologies", "transports", "comm", "bootstrap", "planner")}


def test_only_the_start_of_a_group_imports_transports():
    """When it needs them, but for those that every platform has."""
    named = re.compile(r"hostring\.transports\b")
    users = {m for m in SOURCES if not m.startswith("transports") and any(map(named.match, imported(m)))}
    assert users == {"start", "listeners", "linking"}
    at_once = {name for module in users for name in imported(module, everywhere=False) if name.startswith("hostring.transports.")}
    assert at_once == {f"hostring.transports.{name}" for name in ("memory", "tcp", "unix")}
    assert not {module for module in SOURCES if any(map(named.match, texts(module)))} - {"transports"}


def test_nothing_imports_integrations():
    """The commands and torch's entry point name them, and load them when they are asked for."""
    by_name = set()
    for module in SOURCES:
        if not module.startswith("integrations"):
            assert not {name for name in ours(module) if name.startswith("integrations")}, module
            if any(re.match(r"hostring\.integrations\b", text) for text in texts(module)):
                by_name.add(module.split(".")[0])
    assert by_name == {"commands", "torch_hook"}


def test_integrations_use_the_public_api():
    public = {node.value for node in ast.walk(tree("")) if isinstance(node, ast.Constant)}
    for module in SOURCES:
        if module.startswith("integrations"):
            inner = {name for name in ours(module) if not name.startswith("integrations")}
            assert inner <= {"launch", "launchers"}, module
            names = {n.removeprefix("hostring.") for n in imported(module) if n.startswith("hostring.") and "integrations" not in n}
            assert {n.split(".")[0] for n in names} <= public | {"launch", "launchers"}, module


def test_core_imports_no_torch():
    """Statically, at the top: never. Inside a function: only where torch's own store is read, and to measure torch itself."""
    inside = set()
    for module in SOURCES:
        if module.startswith("integrations"):
            continue
        assert not {n for n in imported(module, everywhere=False) if n.split(".")[0] in ("torch", "transformers")}, module
        if any(n.split(".")[0] == "torch" for n in imported(module)):
            inside.add(module.split(".")[0])
    assert inside <= {"store", "bench"}


def test_nobody_imports_the_top_folders_by_their_bare_names():
    for module in SOURCES:
        assert not {n for n in imported(module) if n.split(".")[0] in TEXT}, module


def test_no_module_is_loaded_in_a_circle():
    """At the top of the modules: what is imported inside functions may look back."""

    def direct(module: str) -> set[str]:
        short = {n.removeprefix("hostring").lstrip(".") for n in imported(module, everywhere=False) if n.split(".")[0] == "hostring"}
        return {n for n in short if n in SOURCES} - {"", module}

    done: set[str] = set()

    def visit(module: str, path: tuple[str, ...]) -> None:
        assert module not in path, " → ".join([*path, module])
        if module not in done:
            for name in direct(module):
                if not module.startswith(f"{name}."):  # a package may be named by its own modules
                    visit(name, (*path, module))
            done.add(module)

    for module in SOURCES:
        if module:
            visit(module, ())


def test_the_wheel_lists_every_package():
    setup = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    folders = {str(f.parent.relative_to(ROOT)) for name in ("hostring", *TEXT) for f in (ROOT / name).rglob("__init__.py")}
    on_disk = {folder.replace("/", ".") for folder in folders if not folder.startswith(("hostring/transports", "hostring/integrations"))}
    on_disk = {name if name.split(".")[0] == "hostring" else f"hostring.{name}" for name in on_disk}
    assert set(setup["packages"]) == on_disk
    assert setup["package-dir"] == {"hostring": "hostring", "hostring.transports": "transports", "hostring.integrations": "integrations"}


def test_every_folder_of_sources_is_a_package():
    for file in SOURCES.values():
        assert (file.parent / "__init__.py").exists(), file


def test_the_links_in_the_checkout_lead_to_the_top_folders():
    for name, folder in TEXT.items():
        link = ROOT / "hostring" / name
        assert link.is_symlink()
        assert not link.readlink().is_absolute()
        assert link.resolve() == folder.resolve()


def test_a_second_copy_of_a_top_folder_is_refused(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT))
    for name in TEXT:
        with pytest.raises(ImportError, match=f"hostring.{name}"):
            __import__(name)
