"""The command line: fast help, launch, and a certify that fails when it must."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from hostring.arrays.fold import ORDERS
from hostring.bench import certify_links
from hostring.commands.certify import sizes
from hostring.commands.cli import app
from hostring.topologies import TOPOLOGIES, Variant, mesh
from hostring.topologies.proof import NotCertified, combinations


def hostring(*args: str, timeout: float = 60.0) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "hostring", *args], capture_output=True, text=True, timeout=timeout)


def test_help_lists_the_commands_without_loading_torch_or_integrations() -> None:
    shown = CliRunner().invoke(app, ["--help"])
    assert shown.exit_code == 0
    for command in ("launch", "certify", "demo", "generate"):
        assert f"\n  {command} " in shown.output
    heavy = "[m for m in sys.modules if m == 'torch' or m.startswith('hostring.integrations')]"
    code = f"import sys, hostring.commands.cli; print({heavy})"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert loaded.stdout.strip() == "[]", loaded.stderr


def test_version() -> None:
    import hostring as package

    assert CliRunner().invoke(app, ["--version"]).output.strip() == package.__version__


PROGRAM = """
import os, sys, numpy as np, hostring
with hostring.init() as comm:
    total = comm.all_reduce(np.array([10.0 ** comm.rank], np.float32))
    # one write is whole, whatever the other rank writes
    os.write(1, f"{comm.rank} {comm.topology} {int(total[0])} {sys.argv[1:]}\\n".encode())
    sys.exit(int(sys.argv[1]) if comm.rank == 1 else 0)
"""


@pytest.mark.parametrize(("code", "topology"), [("0", "ring"), ("7", "star")])
def test_launch_starts_ranks_passes_arguments_and_returns_their_exit_code(
    tmp_path: Path, code: str, topology: str
) -> None:
    script = tmp_path / "program.py"
    script.write_text(PROGRAM, encoding="utf-8")
    done = hostring("launch", "-n", "2", "--topology", topology, str(script), code, "--topology", "mine")
    assert done.returncode == int(code), done.stderr
    expected = f"{topology} 11 {[code, '--topology', 'mine']}"
    assert sorted(done.stdout.splitlines()) == [f"0 {expected}", f"1 {expected}"]


def test_launch_runs_a_module() -> None:
    done = hostring("launch", "-n", "2", "--prefix", "-m", "hostring", "--version")
    assert done.returncode == 0, done.stderr
    assert len(set(done.stdout.split())) == 3, done.stdout  # [0], [1] and the version


def test_certify_proves_every_combination_and_compares_bits_on_links() -> None:
    shown = CliRunner().invoke(app, ["certify", "--max-ranks", "3", "--max-units", "5"])
    assert shown.exit_code == 0, shown.output
    n = len(list(combinations()))
    results = n * sum(ranks * len(sizes(ranks)) for ranks in (2, 3))
    assert f"certified: {n} combinations" in shown.output
    assert f"{results} results over loopback TCP" in shown.output
    assert "certified: 240 splits of 1 to 5 units over 1 to 3 ranks" in shown.output
    for topology, variant, order in combinations():
        assert [line for line in shown.output.splitlines() if line.split()[:3] == [topology, variant, order]]


def test_certify_without_links_says_nothing_of_links() -> None:
    shown = CliRunner().invoke(
        app, ["certify", "--max-ranks", "2", "--no-links", "--max-units", "2", "--max-unit-ranks", "3"]
    )
    assert shown.exit_code == 0
    assert "of 1 to 2 units over 1 to 3 ranks" in shown.output
    assert "links" not in shown.output
    assert "TCP" not in shown.output


def test_certify_fails_on_a_schedule_that_folds_otherwise_than_declared(monkeypatch: pytest.MonkeyPatch) -> None:
    def rotated(place, n_elements, order, segment):  # type: ignore[no-untyped-def]
        return mesh.two_shot(place, n_elements, "ring" if order == "rank" else order, segment)

    monkeypatch.setitem(TOPOLOGIES["mesh"].variants, "two_shot", Variant(2, rotated, ORDERS))
    shown = CliRunner().invoke(app, ["certify", "--max-ranks", "3", "--no-links"])
    assert shown.exit_code == 1
    assert "NOT CERTIFIED: mesh/two_shot, order rank" in shown.output
    assert "declared is" in shown.output


def test_certify_fails_on_other_bits_on_real_links(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        certify_links, "numpy_fold", lambda rows, order, unit: rows[::-1].sum(0, dtype="f8").astype("f4")
    )
    with pytest.raises(
        NotCertified, match=r"mesh/one_shot, order rank, 3 ranks over tcp: rank \d: other bits in \d+ of 1000 elements"
    ):
        certify_links.certify_on_links("mesh", "one_shot", "rank", 3, [1000], 8)


@pytest.mark.parametrize("order", ORDERS)
def test_the_contributions_tell_orders_apart(order: str) -> None:
    rows = certify_links.contributions(5, 1000)
    folds = {o: certify_links.numpy_fold(rows, o) for o in ORDERS}
    assert all((folds[order] != folds[other]).any() for other in ORDERS if other != order)
    assert len({row.tobytes() for row in rows}) == 5


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["demo", "--dtypes", "float16,int8"], "dtype 'int8' is not one of float16, bfloat16, float32"),
        (["demo", "--ranks", "3", "--dtypes", "f16,bf16"], "2 dtypes for 3 ranks"),
        (["demo", "--model", "nowhere.gguf"], "no model at nowhere.gguf"),
        (["demo", "--topology", "cube"], "topology"),
    ],
)
def test_what_the_user_can_put_right_is_one_line(args: list[str], message: str) -> None:
    done = hostring(*args)
    assert done.returncode != 0
    assert message in done.stderr
    assert "Traceback" not in done.stderr
