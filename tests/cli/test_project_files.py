"""YAML and TOML files parse, and name the same versions and platforms."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

import hostring

try:
    import tomllib
except ModuleNotFoundError:  # Python 3.10
    tomllib = pytest.importorskip("tomli")

ROOT = Path(__file__).parents[2]
YAML_FILES = [
    ROOT / "CITATION.cff",
    ROOT / "mkdocs.yml",
    ROOT / ".pre-commit-config.yaml",
    *ROOT.glob(".github/**/*.yml"),
]


def read_yaml(name: str) -> Any:
    return yaml.safe_load((ROOT / name).read_text(encoding="utf-8"))


def project() -> Any:
    return tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


@pytest.mark.parametrize("file", YAML_FILES, ids=lambda file: file.name)
def test_yaml_parses(file: Path) -> None:
    assert isinstance(yaml.safe_load(file.read_text(encoding="utf-8")), dict)


def test_the_version_is_the_same_everywhere() -> None:
    released = re.search(
        r"^## \[(\d[^\]]*)\] - (\d{4}-\d\d-\d\d)$", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), re.M
    )
    assert released is not None
    citation = read_yaml("CITATION.cff")
    assert project()["version"] == hostring.__version__ == citation["version"] == released[1]
    assert str(citation["date-released"]) == released[2]


def test_the_tested_pythons_and_systems_are_those_that_the_package_names() -> None:
    matrix = read_yaml(".github/workflows/ci.yml")["jobs"]["installed"]["strategy"]["matrix"]
    classifiers = project()["classifiers"]
    assert {c.rpartition(" ")[2] for c in classifiers if re.search(r":: 3\.\d+$", c)} == set(matrix["python"])
    assert ("Operating System :: MacOS" in classifiers) == ("macos-latest" in matrix["os"])
    assert ("Operating System :: POSIX :: Linux" in classifiers) == ("ubuntu-latest" in matrix["os"])
    assert project()["requires-python"] == f">={matrix['python'][0]}"
    oldest = next(d for d in project()["dependencies"] if d.startswith("numpy")).removeprefix("numpy>=")
    assert f"{oldest}.*" in {row["numpy"] for row in matrix["include"]}


def test_every_page_of_the_site_exists_and_is_in_the_navigation() -> None:
    def pages(entries: Any) -> list[str]:
        if isinstance(entries, str):
            return [entries]
        return [page for entry in (entries.values() if isinstance(entries, dict) else entries) for page in pages(entry)]

    docs = ROOT / "docs"
    assert sorted(pages(read_yaml("mkdocs.yml")["nav"])) == sorted(str(p.relative_to(docs)) for p in docs.rglob("*.md"))
