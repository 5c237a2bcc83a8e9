"""Wrong command lines: one clear error, exit code 2, and nothing is started, written or left behind."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from hostring.bench import main as bench
from hostring.commands.cli import main as hostring_command

BENCH = ("hostring.bench",)
LAUNCH = ("hostring", "launch")
DOCTOR = ("hostring", "doctor")
PLAN = ("hostring", "plan", "topology")
CLUSTER = ("hostring", "cluster")

WRONG: list[tuple[tuple[str, ...], list[str], str]] = [
    # names that don't exist: the message lists those that do
    (BENCH, ["all_reduse"], "all_reduce, reduce_scatter"),
    (BENCH, [""], "all_reduce, reduce_scatter"),
    (BENCH, ["all_reduce", "everything"], "all_reduce, reduce_scatter"),
    (BENCH, ["--dtype", "float13"], "float32, float16"),
    (BENCH, ["--dtype", ""], "float32, float16"),
    (BENCH, ["--op", "mean"], "sum, avg, min, max"),
    (BENCH, ["--topology", "cube"], "mesh, ring, star, tree"),
    (BENCH, ["--topology", ""], "--topology '': name at least one"),
    (BENCH, ["--topology", ","], "--topology ',': name at least one"),
    (BENCH, ["--topology", "mesh/relay"], "mesh/one_shot"),
    (BENCH, ["--order", "random"], "rank, ring, tree"),
    (BENCH, ["--transport", "carrier-pigeon"], "auto, shm, tcp, tls, unix"),
    (BENCH, ["--transport", ""], "auto, shm, tcp, tls, unix"),
    (BENCH, ["--wire", "float4"], "float32, bfloat16, mxint8"),
    (BENCH, ["--array", "jax"], "numpy, torch"),
    (BENCH, ["--array", "numpy,torch"], "one of numpy, torch"),
    (BENCH, ["--peers", "nccl"], "gloo"),
    # numbers
    (BENCH, ["--sizes", "-4"], "size '-4'"),
    (BENCH, ["--sizes", ""], "size ''"),
    (BENCH, ["--sizes", "4:64:x"], "FACTOR 'x' is not a number"),
    (BENCH, ["--sizes", "4:64:nan"], "FACTOR > 1"),
    (BENCH, ["--sizes", "4:64:inf"], "FACTOR > 1"),
    (BENCH, ["--sizes", "99999G"], "over 16 GiB"),
    (BENCH, ["-n", "0"], "Invalid value for '-n'"),
    (BENCH, ["-n", "two"], "Invalid value for '-n'"),
    (BENCH, ["--rounds", "-1"], "Invalid value for '--rounds'"),
    (BENCH, ["--seconds", "-1"], "--seconds -1: must be more than 0"),
    (BENCH, ["--seconds", "nan"], "--seconds nan: must be more than 0"),
    (BENCH, ["--decode-loop", "30"], "LAYERS,HIDDEN"),
    (BENCH, ["--decode-loop", "0,5"], "must be positive"),
    (BENCH, ["--decode-loop", "2,64", "--tokens", "0"], "Invalid value for '--tokens'"),
    (BENCH, ["--decode-loop", "2,64", "--gap-us", "-1"], "Invalid value for '--gap-us'"),
    # files
    (BENCH, ["--json", "{folder}"], "--json {folder}: this is a directory"),
    (BENCH, ["--json", "{folder}/none/out.json"], "there is no directory {folder}/none"),
    (BENCH, ["--json", "-"], "--json -: standard output has what people read"),
    (("hostring", "demo"), ["--json", "-"], "--json -: standard output has what people read"),
    (BENCH, ["--plot", "{folder}/none/out.png"], "there is no directory {folder}/none"),
    (BENCH, ["--plot", "{folder}/out.xyz"], "no format is called 'xyz'; use one of"),
    (BENCH, ["--colour"], "No such option"),
    (LAUNCH, ["-n", "2"], "Missing argument"),
    (LAUNCH, ["{folder}/x.py"], "Missing option '-n'"),
    (LAUNCH, ["-n", "2", ""], "no script is called ''"),
    (LAUNCH, ["-n", "2", "{folder}/none.py"], "there is no script {folder}/none.py"),
    (LAUNCH, ["-n", "2", "{folder}"], "{folder} holds no __main__.py"),
    (LAUNCH, ["-n", "2", "-m", "no_such_module_anywhere"], "no module is called no_such_module_anywhere"),
    (LAUNCH, ["-n", "2", "-m", ""], "no module is called ''"),
    (LAUNCH, ["-n", "2", "-m", "{folder}/x.py"], "no module is called {folder}/x.py; leave out -m"),
    (LAUNCH, ["-n", "-2", "x.py"], "Invalid value for '-n'"),
    (LAUNCH, ["-n", "2", "--topology", "cube", "{script}"], "mesh, ring, star, tree"),
    (LAUNCH, ["-n", "2", "--topology", "tree", "{script}"], "order='tree'"),
    (LAUNCH, ["-n", "2", "--order", "random", "{script}"], "rank, ring, tree"),
    (LAUNCH, ["-n", "2", "--transport", "memory", "{script}"], "auto, shm, tcp, tls, unix"),
    (LAUNCH, ["-n", "2", "--transport", "", "{script}"], "auto, shm, tcp, tls, unix"),
    (LAUNCH, ["-n", "2", "--timeout", "0", "{script}"], "--timeout 0: must be more than 0"),
    (LAUNCH, ["-n", "2", "--timeout", "nan", "{script}"], "--timeout nan: must be more than 0"),
    (LAUNCH, ["-n", "2", "--rejoin", "-1", "{script}"], "Invalid value for '--rejoin'"),
    (DOCTOR, ["--peer", ""], "--peer '': "),
    (DOCTOR, ["--peer", "host"], "--peer 'host': 'host' names no port"),
    (DOCTOR, ["--peer", "host:0"], "not a port (1 to 65535)"),
    (DOCTOR, ["--peer", "[::1"], "write [IPv6]:port"),
    (DOCTOR, ["--listen", "-1"], "Invalid value for '--listen'"),
    (DOCTOR, ["--listen", "70000"], "Invalid value for '--listen'"),
    (DOCTOR, ["--listen", "0", "--host", "no-such-host.invalid"], "can't listen on --host no-such-host.invalid"),
    (DOCTOR, ["--listen", "0", "--host", ""], "can't listen on --host"),
    (DOCTOR, ["--token", "abc"], "this is no join token"),
    (DOCTOR, ["-n", "0"], "Invalid value for '-n'"),
    (PLAN, ["--ranks", "1"], "expected 2 <= MIN <= MAX"),
    (PLAN, ["--ranks", ""], "expected MIN..MAX"),
    (PLAN, ["--order", "random"], "use any, rank, ring, tree"),
    (PLAN, ["--links", "{folder}/none.json"], "none.json"),
    (PLAN, ["--links", "{folder}"], "{folder}"),
    (PLAN, ["--json", "{folder}"], "--json {folder}: this is a directory"),
    (CLUSTER, ["join", "abc"], "this is no join token"),
    (CLUSTER, ["init", "-n", "1"], "Invalid value for '-n'"),
    (("hostring", "trace"), ["{folder}"], "no hostring-*.json in {folder}"),
    (("hostring", "trace"), ["{script}"], "is no flight record"),
    (("hostring", "trace"), ["{folder}/none.json"], "none.json"),
    (("hostring", "certify"), ["--wire", "float4"], "float32 or bfloat16 or mxint8"),
    (("hostring", "certify"), ["--max-ranks", "1"], "Invalid value for '--max-ranks'"),
    (("hostring", "certify"), ["--max-units", "0"], "Invalid value for '--max-units'"),
    (("hostring", "xray"), ["{script}", "{script}"], "is no recording of a run"),
    (("hostring", "xray"), ["{folder}/none.npz", "{script}"], "none.npz"),
    (("hostring", "evidence"), ["nowhere.gguf", "--out", "{folder}/out"], "no model at nowhere.gguf"),
    (("hostring", "evidence"), ["{script}", "--out", "{folder}/out", "--lengths", "4,x"], "give numbers of tokens"),
    (("hostring", "tune"), ["--topology", "cube"], "mesh, ring, star, tree"),
    (("hostring", "tune"), ["--sizes", "x"], "size 'x'"),
    (("hostring",), ["lunch"], "No such command 'lunch'"),
    (("hostring",), ["--colour"], "No such option"),
]


def ran(command: tuple[str, ...], argv: list[str], **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", *command, *argv],
        capture_output=True,
        encoding="utf-8",
        timeout=60,
        stdin=subprocess.DEVNULL,
        env={**os.environ, "COLUMNS": "200", **variables},
        check=False,
    )


def placed(folder: Path, argv: list[str], words: str) -> tuple[list[str], str]:
    """The line and what it must say, with the paths of `folder`, which then holds a script."""
    script = folder / "script.py"
    script.write_text("print('started')", encoding="utf-8")
    for name, place in {"{folder}": str(folder), "{script}": str(script)}.items():
        argv, words = [a.replace(name, place) for a in argv], words.replace(name, place)
    return argv, words


def check_one_error(code: Any, out: str, err: str, words: str, folder: Path) -> None:
    assert code == 2, err
    assert words in err
    assert "Traceback" not in err
    assert "started" not in out
    errors = [line for line in err.splitlines() if not line.startswith(("Usage:", "Try '")) and line.strip()]
    assert len(errors) == 1, err
    assert [file.name for file in folder.iterdir()] == ["script.py"]


@pytest.mark.parametrize(("command", "argv", "words"), WRONG, ids=[" ".join([*c[-1:], *a])[:60] for c, a, _ in WRONG])
def test_a_wrong_line_is_one_error(
    tmp_path: Path,
    command: tuple[str, ...],
    argv: list[str],
    words: str,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """In this process, which spares 90 starts."""
    argv, words = placed(tmp_path, argv, words)
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setattr(sys.modules["__main__"], "__package__", None)  # else the program is called pytest
    monkeypatch.setattr(sys, "argv", ["hostring", *command[1:], *argv])
    monkeypatch.setattr(sys, "stdin", io.StringIO())
    with pytest.raises(SystemExit) as end:
        (bench if command == BENCH else hostring_command)()
    check_one_error(end.value.code, *capfd.readouterr(), words, tmp_path)


@pytest.mark.parametrize(
    ("command", "argv", "words"), [next(case for case in WRONG if case[0] == command) for command in (BENCH, LAUNCH)]
)
def test_a_wrong_line_of_a_process_is_one_error(
    tmp_path: Path, command: tuple[str, ...], argv: list[str], words: str
) -> None:
    argv, words = placed(tmp_path, argv, words)
    done = ran(command, argv)
    check_one_error(done.returncode, done.stdout, done.stderr, words, tmp_path)


@pytest.mark.parametrize("operations", [[{}], [7], 7, [{"seq": 1}]])
def test_a_flight_record_of_another_version_is_one_error(tmp_path: Path, operations: object) -> None:
    file = tmp_path / "hostring-0.json"
    record = {"group": "world", "rank": 0, "world_size": 2, "failure": "", "operations": operations}
    file.write_text(json.dumps(record), encoding="utf-8")
    done = ran(("hostring", "trace"), [str(file)])
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert f"{file} is no flight record" in done.stderr


BLOCKED = """
import sys
class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {missing}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)
sys.meta_path.insert(0, Blocked())
"""


@pytest.mark.parametrize(
    ("missing", "argv", "words"),
    [
        ("torch", ["--peers", "gloo"], "hostring-bench: --peers gloo needs torch: pip install 'hostring[torch]'\n"),
        ("torch", ["--array", "torch"], "hostring-bench: --array torch needs torch: pip install 'hostring[torch]'\n"),
        ("matplotlib", ["--plot", "x.png"], "hostring-bench: --plot needs matplotlib: pip install 'hostring[plot]'\n"),
    ],
)
def test_a_missing_package_is_named_before_anything_starts(
    tmp_path: Path, missing: str, argv: list[str], words: str
) -> None:
    (tmp_path / "sitecustomize.py").write_text(BLOCKED.format(missing=[missing]), encoding="utf-8")
    paths = os.pathsep.join(filter(None, [str(tmp_path), os.environ.get("PYTHONPATH", "")]))
    done = ran(BENCH, argv, PYTHONPATH=paths)
    assert (done.returncode, done.stderr, done.stdout) == (2, words, "")


def test_without_a_missing_package_the_bench_still_runs(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(BLOCKED.format(missing=["torch", "matplotlib"]), encoding="utf-8")
    paths = os.pathsep.join(filter(None, [str(tmp_path), os.environ.get("PYTHONPATH", "")]))
    out = tmp_path / "out.json"
    done = ran(BENCH, ["--sizes", "4", "--iterations", "1", "--rounds", "1", "--json", str(out)], PYTHONPATH=paths)
    assert done.returncode == 0, done.stderr
    assert json.loads(out.read_text(encoding="utf-8"))["rows"]


@pytest.mark.parametrize(
    "command", [["hostring"], ["hostring.bench"], ["hostring", "launch"], ["hostring", "doctor"]], ids=" ".join
)
def test_help_is_readable_at_80_columns(command: list[str]) -> None:
    shown = ran(tuple(command), ["--help"], COLUMNS="80").stdout
    assert max(map(len, shown.splitlines())) <= 80
