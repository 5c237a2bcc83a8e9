"""The files of `examples/serve` say what `hostring serve` knows."""

from __future__ import annotations

import re

import pytest
import typer
import yaml
from source_tree import ROOT

from hostring.commands.cli import app

FOLDER = ROOT / "examples" / "serve"
FILES = sorted(path.name for path in FOLDER.iterdir() if path.is_file())
OTHERS = {"--nodes", "--one-node", "--cpus"}  # of ray_serve.py itself


def options_of_serve() -> set[str]:
    command = typer.main.get_command(app).commands["serve"]  # type: ignore[attr-defined]
    return {option for parameter in command.params for option in parameter.opts if option.startswith("--")}


@pytest.mark.parametrize("name", FILES)
def test_options_exist(name: str) -> None:
    """All that stand in a line with, or after, `hostring serve`."""
    text = (FOLDER / name).read_text(encoding="utf-8").replace("python ray_serve.py", "hostring serve")
    found = [line for line in text.splitlines() if "hostring serve" in line or line.strip().startswith(("--", "- --"))]
    words = " ".join(line.partition("serve")[2] or line for line in found)
    used = set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", words))
    assert used <= options_of_serve() | OTHERS
    assert used or name in ("Dockerfile", "hostring-serve.env")


@pytest.mark.parametrize("name", ["compose.yaml", "leaderworkerset.yaml"])
def test_yaml_is_read_and_every_rank_has_a_place(name: str) -> None:
    documents = list(yaml.safe_load_all((FOLDER / name).read_text(encoding="utf-8")))
    if name == "compose.yaml":
        services = documents[0]["services"].values()
        assert [service["environment"]["RANK"] for service in services] == ["0", "1"]
        assert {service["environment"]["WORLD_SIZE"] for service in services} == {"2"}
        return
    templates = documents[0]["spec"]["leaderWorkerTemplate"]
    pods = [templates["leaderTemplate"]["spec"], templates["workerTemplate"]["spec"]]
    for pod in pods:
        (container,) = pod["containers"]
        assert {"RANK=", "WORLD_SIZE=", "MASTER_ADDR="} <= set(re.findall(r"[A-Z_]+=", container["args"][0]))
        assert {mount["name"] for mount in container["volumeMounts"]} == {volume["name"] for volume in pod["volumes"]}
