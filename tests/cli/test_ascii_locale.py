"""Where the locale has only ASCII, every command's output can be written. For files see `test_encodings`."""

from __future__ import annotations

import codecs
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from hostring.command_line import ascii_form

ASCII = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}


FORMS = [("\u00b5", "u"), ("\u03bc", "u"), ("\u2026", "..."), ("\u2500", "-"), ("\u2501", "-"), ("\u2502", "|")]
FORMS += [("\u253c", "+"), ("\u2563", "+"), ("\u2013", "-"), ("\u00d7", "x"), ("\u2019", "'"), ("\u00e9", "?")]


@pytest.mark.parametrize(("character", "form"), FORMS)
def test_characters_have_a_form_in_ascii(character: str, form: str) -> None:
    assert ascii_form(character) == form
    assert f"1 {character}s".encode("ascii", "hostring.ascii") == f"1 {form}s".encode()


def test_bytes_that_are_no_text_stay_as_they_are() -> None:
    name = os.fsdecode(b"caf\xc3\xa9.gguf") if sys.getfilesystemencoding() == "ascii" else "caf\udcc3\udca9.gguf"
    assert name.encode("ascii", "hostring.ascii") == b"caf\xc3\xa9.gguf"
    assert codecs.lookup_error("hostring.ascii")


def run(*argv: str, module: str = "hostring", stdin: str = "", **variables: str) -> subprocess.CompletedProcess[bytes]:
    """A command under an ASCII locale."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("LC_", "LANG"))}
    environment |= {**ASCII, **variables}
    return subprocess.run(
        [sys.executable, "-m", module, *argv],
        env=environment,
        capture_output=True,
        input=stdin.encode(),
        timeout=110,
        check=False,
    )


COMMANDS = (
    "launch",
    "certify",
    "demo",
    "generate",
    "cluster",
    "trace",
    "doctor",
    "tune",
    "plan",
    "xray",
    "evidence",
    "model",
)


def shown(done: subprocess.CompletedProcess[bytes], code: int = 0) -> str:
    assert done.returncode == code, done.stderr
    assert b"Traceback" not in done.stderr
    assert b"UnicodeEncodeError" not in done.stderr
    return done.stdout.decode("ascii")


@pytest.mark.parametrize("argv", [[], *([name] for name in COMMANDS[:-1]), ["cluster", "init"], ["plan", "topology"]])
def test_help(argv: list[str]) -> None:
    assert "Usage" in shown(run(*argv, "--help"))


def test_certify_plan_and_doctor() -> None:
    assert "certified" in shown(run("certify", "--max-ranks", "2", "--no-links", "--max-units", "4"))
    table = shown(run("plan", "topology", "--ranks", "2..3", "--sizes", "4K"))
    assert "milliseconds" in table
    assert "?" not in table
    done = run("doctor", "-n", "1")
    assert b"Traceback" not in done.stderr
    assert "interface lo" in done.stdout.decode("ascii")


def test_trace(tmp_path: Path) -> None:
    row = {"seq": 1, "collective": "all_reduce", "dtype": "float32", "n_elements": 4, "seconds": 1e-4, "wait": 0.0}
    operations = [
        {
            **row,
            "waited_for": None,
            "schedule": "mesh",
            "sent": 16,
            "received": 16,
            "start": 0.0,
            "began": 0.0,
            "started": 0.0,
            "at": 0.0,
        }
    ]
    document = {"group": "caf\u00e9", "rank": 0, "world_size": 1, "failure": "\u2026", "operations": operations}
    file = tmp_path / "hostring-0.json"
    file.write_text(json.dumps(document, ensure_ascii=False), encoding="utf-8")
    assert "caf?, rank 0 of 1" in shown(run("trace", str(file)))


def test_launch_and_what_its_ranks_print(tmp_path: Path) -> None:
    script = tmp_path / "caf\u00e9.py"
    script.write_text("import sys; sys.stderr.buffer.write('1 \u00b5s\\n'.encode()); print('out')", encoding="utf-8")
    done = run("launch", "-n", "2", "--prefix", str(script))
    assert shown(done).splitlines() == ["[0] out", "[1] out"] or sorted(shown(done).splitlines()) == [
        "[0] out",
        "[1] out",
    ]
    assert sorted(done.stderr.decode().splitlines()) == ["[0] 1 \u00b5s", "[1] 1 \u00b5s"]


def test_a_cluster_with_names_that_are_no_ascii(tmp_path: Path) -> None:
    script = tmp_path / "rank.py"
    script.write_text("import os; print('rank', os.environ['RANK'], flush=True)", encoding="utf-8")
    environment = {**os.environ, **ASCII}
    argv = [sys.executable, "-m", "hostring", "cluster"]
    first = subprocess.Popen(
        [*argv, "init", "-n", "2", "--host", "127.0.0.1", "--name", "caf\u00e9", "--", str(script)],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    try:
        assert first.stdout is not None
        token = next(line.split()[-1] for line in first.stdout if b"cluster join" in line).decode("ascii")
        second = run("cluster", "join", token, "--name", "th\u00e9", "--", str(script))
        assert "rank 1" in shown(second)
        rest = first.communicate(timeout=60)[0].decode("ascii")
        assert first.returncode == 0, rest
        assert "rank 0" in rest
        assert "UnicodeEncodeError" not in rest
    finally:
        first.kill()
        first.wait()


def test_bench_and_its_files(tmp_path: Path) -> None:
    out = tmp_path / "caf\u00e9.json"
    done = run("--sizes", "4", "--iterations", "1", "--rounds", "1", "--json", str(out), module="hostring.bench")
    assert "# wrong elements: 0" in shown(done)
    assert json.loads(out.read_text(encoding="utf-8"))["settings"]["ranks"] == 2


def test_a_secret_that_is_no_ascii_lets_ranks_meet(tmp_path: Path) -> None:
    script = tmp_path / "rank.py"
    script.write_text("import hostring\nwith hostring.init(timeout=30) as c: c.barrier()", encoding="utf-8")
    shown(run("launch", "-n", "2", str(script), HOSTRING_SECRET="\u00fcber"))


def test_the_demo_to_its_last_table() -> None:
    pytest.importorskip("torch")
    text = shown(run("demo", "--max-tokens", "4", "--no-controls", "--prompt", "In the beginning"))
    assert "us per decoded token" in text
    assert "sha256 of all reduced activations" in text
