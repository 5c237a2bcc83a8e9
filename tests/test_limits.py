"""No file is too long to be read, and no function: in the sources, in tests, benchmarks and examples."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from source_tree import ROOT, SOURCES

MAX_FILE_LINES = 300


MAX_FUNCTION_LINES = 40  # its docstring apart


def functions(node: ast.AST, prefix: str) -> Iterator[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef]]:
    """All functions below `node`, by their full names."""
    for child in ast.iter_child_nodes(node):
        name = f"{prefix}.{child.name}" if hasattr(child, "name") else prefix
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
            yield name, child
        yield from functions(child, name)


def lines_of(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """From `def` to the last line, without the docstring."""
    first = function.body[0]
    docstring = first.end_lineno - first.lineno + 1 if ast.get_docstring(function) else 0
    return function.end_lineno - function.lineno + 1 - docstring


LONG_FUNCTIONS = {
    "hostring.engine.engine.Engine.run_direct": "the hot path: a call in between would cost more than its arithmetic",
}
"""Functions that may be longer, and why."""

FILES = {f"hostring.{name}": file for name, file in SOURCES.items()} | {
    ".".join(file.relative_to(ROOT).with_suffix("").parts): file
    for folder in ("tests", "benchmarks", "examples")
    for file in (ROOT / folder).rglob("*.py")
}


def too_long(sources: dict[str, str]) -> set[str]:
    """Functions of these modules, by their full names."""
    return {
        name
        for module, source in sources.items()
        for name, function in functions(ast.parse(source), module)
        if lines_of(function) > MAX_FUNCTION_LINES
    }


def texts() -> dict[str, str]:
    return {module: file.read_text(encoding="utf-8") for module, file in FILES.items()}


def test_the_files_are_found() -> None:
    assert {"hostring.engine.engine", "tests.test_limits", "tests.llm.test_demo", "benchmarks.soak"} <= set(FILES)


def test_no_file_is_too_long() -> None:
    lengths = {module: len(source.splitlines()) for module, source in texts().items()}
    assert {module: n for module, n in lengths.items() if n > MAX_FILE_LINES} == {}


def test_no_function_is_too_long() -> None:
    assert too_long(texts()) == set(LONG_FUNCTIONS)


def test_a_function_that_is_too_long_is_noticed() -> None:
    docstring = '        """One.\n\n        Two.\n        """\n'
    for n_lines, noticed in ((MAX_FUNCTION_LINES - 1, set()), (MAX_FUNCTION_LINES, {"m.A.f"})):  # and the line of `def`
        source = f"class A:\n    def f(self):\n{docstring}" + "        pass\n" * n_lines
        assert too_long({"m": source}) == noticed
