"""hostring-bench: what it prints and writes, what it refuses, and that it notices wrong results.

No timings are judged.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from oracle import fold_in_order, rank_distinct
from ranks import free_ports

from hostring.bench.cases import BUS_FACTORS, COLLECTIVES, case
from hostring.bench.contenders import Gloo, Hostring
from hostring.bench.loop import Loop, decode_loop
from hostring.bench.measure import Effort, Session
from hostring.bench.plot import plot
from hostring.bench.report import LoopTable, Table
from hostring.bench.sizes import parse_size, parse_sizes, show
from hostring.bench.truth import DTYPES, contribution, count_wrong, dtype_of, folded

QUICK = Effort(iterations=2, rounds=2, warmup=1)


def quiet(what: str) -> None:
    pass


def bench(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "hostring.bench", *arguments], capture_output=True, text=True, timeout=100, check=False
    )


def test_a_small_run_writes_all_that_it_shows(tmp_path):
    file, picture = tmp_path / "out.json", tmp_path / "out.png"
    options = (
        "--ranks",
        "2",
        "--sizes",
        "4B:4K:x8",
        "--topology",
        "auto,ring",
        "--iterations",
        "2",
        "--rounds",
        "2",
        "--transport",
        "tcp",
    )
    run = bench("all_reduce", "broadcast", *options, "--json", str(file), "--plot", str(picture))
    assert run.returncode == 0, run.stdout + run.stderr
    assert "# wrong elements: 0" in run.stdout
    document = json.loads(file.read_text(encoding="utf-8"))
    assert document["settings"]["ranks"] == 2
    rows = document["rows"]
    assert {(r["collective"], r["contender"], r["nbytes"]) for r in rows} == {
        (c, t, n) for c in ("all_reduce", "broadcast") for t in ("auto", "ring") for n in (4, 32, 256, 2048, 4096)
    }
    for row in rows:
        assert row["wrong"] == 0
        assert row["count"] * 4 == row["nbytes"]
        assert 0 < row["min_us"] <= row["p50_us"] <= row["p99_us"]
        assert len(row["rounds_p50_us"]) == 2
        assert row["algbw_GBps"] == pytest.approx(row["nbytes"] / row["p50_us"] / 1e3)
        assert row["busbw_GBps"] == pytest.approx(row["algbw_GBps"]), "both factors are 1 for two ranks"
    assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("wire", ["bfloat16", "mxint8"])
def test_a_rank_alone_rounds_nothing(run_ranks, wire):
    def body(comm):
        session = Session(comm, [Hostring("auto", comm)], QUICK)
        return [
            row.wrong for row in session.rows(case("all_reduce", "sum", np.dtype(np.float32), 999, 1, "rank"), quiet)
        ]

    assert run_ranks(1, body, wire=wire) == [[0]]


@pytest.mark.parametrize("collective", COLLECTIVES)
@pytest.mark.parametrize("order", ["rank", "ring", "tree"])
def test_every_collective_is_measured_and_right(run_ranks, collective, order):
    def body(comm):
        session = Session(comm, [Hostring("auto", comm)], QUICK)
        wanted = [case(collective, "sum", np.dtype(dtype), 999, 3, order) for dtype in (np.float32, np.int8)]
        return [row for w in wanted for row in session.rows(w, quiet)]

    for rows in run_ranks(3, body, order=order):
        assert [row.wrong for row in rows] == ([None, None] if collective == "barrier" else [0, 0])


@pytest.mark.parametrize("op", ["avg", "min", "max", "prod"])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float64"])
def test_every_operator_is_measured_and_right(run_ranks, op, dtype):
    wanted = case("all_reduce", op, dtype_of(dtype), 4000, 3, "rank")
    for rows in run_ranks(3, lambda comm: list(Session(comm, [Hostring("auto", comm)], QUICK).rows(wanted, quiet))):
        assert [row.wrong for row in rows] == [0]


def test_a_broken_fold_is_caught(run_ranks, monkeypatch):
    from hostring.engine import planner

    real = planner.fold_functions
    monkeypatch.setattr(planner, "fold_functions", lambda op, dtype: real("max" if op == "sum" else op, dtype))
    wanted = case("all_reduce", "sum", np.dtype(np.float32), 4000, 2, "rank")

    for rows in run_ranks(2, lambda comm: list(Session(comm, [Hostring("auto", comm)], QUICK).rows(wanted, quiet))):
        assert rows[0].wrong > 1000, "of a thousand elements, twice"


def test_one_wrong_bit_on_one_rank_is_caught_on_all(run_ranks):
    class Slip(Hostring):
        def bind(self, case, x):
            call, comm = super().bind(case, x), self.comm

            def slip(i):
                result = call(i)
                if comm.rank == 1:
                    result.view(np.uint32)[7] ^= 1
                return result

            return slip

    wanted = case("all_reduce", "sum", np.dtype(np.float32), 4000, 3, "rank")
    for rows in run_ranks(
        3, lambda comm: list(Session(comm, [Slip("slip", comm), Hostring("auto", comm)], QUICK).rows(wanted, quiet))
    ):
        assert [row.wrong for row in rows] == [2, 0], "one element before the timing and one after"


def test_a_sum_in_another_order_is_wrong_to_the_bit_and_right_within_rounding():
    rows = [contribution(r, 0, 1000, np.dtype(np.float32)) for r in range(5)]
    rank, tree = (folded(rows, "sum", order) for order in ("rank", "tree"))
    assert count_wrong(tree, rank, True, 5) > 100
    assert count_wrong(tree, rank, False, 5) == 0
    assert count_wrong(tree + 1, rank, False, 5) == 1000


@pytest.mark.parametrize("order", ["rank", "ring", "tree"])
def test_the_benchmarks_fold_is_that_of_the_tests(order):
    rows = rank_distinct(5, 1003)
    assert folded(rows, "sum", order).tobytes() == fold_in_order(order, rows).tobytes()


@pytest.mark.parametrize("dtype", DTYPES)
def test_contributions_differ_by_rank_place_and_seed(dtype):
    rows = [contribution(rank, seed, 512, dtype_of(dtype)) for rank in (0, 1) for seed in (0, 1)]
    assert len({row.tobytes() for row in rows}) == 4
    assert len(np.unique(rows[0].astype(np.complex128))) > (1 if dtype == "bool" else 100)


def test_bus_bandwidth_is_counted_as_nccl_tests_does():
    eight = {name: factor(8) for name, factor in BUS_FACTORS.items()}
    assert eight["all_reduce"] == 14 / 8
    assert eight["all_gather"] == eight["reduce_scatter"] == eight["all_to_all"] == 7 / 8
    assert eight["broadcast"] == eight["reduce"] == 1
    wanted = case("all_gather", "sum", np.dtype(np.float32), 1 << 20, 8, "rank")
    assert (wanted.nbytes, wanted.brought) == (1 << 20, (1 << 18) // 8)
    assert wanted.busbw(1e-3) == pytest.approx((1 << 20) / 1e-3 / 1e9 * 7 / 8)


def test_the_decode_loop_counts_its_calls(run_ranks):
    def body(comm):
        loop = Loop.parse("3,64", gap_us=1.0, tokens=4)
        before = comm.counters.calls["all_reduce"]
        rows = list(
            decode_loop(Session(comm, [Hostring("auto", comm)], QUICK), loop, np.dtype(np.float32), "rank", quiet)
        )
        return rows, comm.counters.calls["all_reduce"] - before

    for (row,), calls in run_ranks(2, body):
        assert row.wrong == 0
        assert calls >= 2 * 3 * (4 + 1) * QUICK.rounds
        assert 0 < row.collective_fraction < 1
        assert LoopTable().lines(row)[-1].startswith("auto")
        assert row.as_dict()["tokens_per_s"] == pytest.approx(1 / row.token_p50)


def gloo_beside(comm):
    contenders = [Hostring("torch", comm, "torch"), Gloo(comm)]
    session = Session(comm, contenders, QUICK)
    names, dtypes = ("all_reduce", "broadcast", "all_gather"), ("float32", "bfloat16")
    wanted = [case(c, "sum", dtype_of(d), 4096, 2, "rank") for c in names for d in dtypes]
    rows = [row.as_dict() for w in wanted for row in session.rows(w, quiet)]
    contenders[1].close()
    return [(row["contender"], row["wrong"], row["ratio"] > 0) for row in rows]


def test_gloo_runs_in_the_same_rounds(run_processes):
    for state, rows in run_processes(2, gloo_beside):
        assert state == "ok", rows
        assert rows == [("torch", 0, True), ("gloo", 0, True)] * 6


def test_a_table_has_a_heading_for_each_collective(run_ranks):
    def body(comm):
        session, table = Session(comm, [Hostring("auto", comm)], QUICK), Table()
        wanted = [
            case(c, "sum", np.dtype(np.float32), 64, 2, "rank") for c in ("all_reduce", "all_reduce", "broadcast")
        ]
        return [text for w in wanted for row in session.rows(w, quiet) for text in table.lines(row)]

    lines = run_ranks(2, body)[0]
    assert [line for line in lines if line.startswith("#")] == ["# all_reduce", "# broadcast"]
    assert len(lines) == 2 * 3 + 3


def test_many_curves_still_fit_a_plot(run_ranks, tmp_path):
    def body(comm):
        session = Session(
            comm, [Hostring(f"way {k}", comm) for k in range(9)], Effort(iterations=1, rounds=1, check=False)
        )
        return [
            row
            for n in (4, 4096)
            for row in session.rows(case("all_reduce", "sum", np.dtype(np.float32), n, 2, "rank"), quiet)
        ]

    plot(str(tmp_path / "many.svg"), run_ranks(2, body)[0], "nine ways")
    assert "way 8" in (tmp_path / "many.svg").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("text", "sizes"),
    [
        ("64K", [65536]),
        ("4B:1K", [4, 16, 64, 256, 1024]),
        ("1,1k,1M", [1, 1024, 1 << 20]),
        ("1K:5K:x2", [1024, 2048, 4096, 5120]),
    ],
)
def test_sizes(text, sizes):
    assert parse_sizes(text) == sizes


@pytest.mark.parametrize("text", ["", "x", "4X", "1K:4", "1:2:1", "1:2:3:4", "0:4", "999999G"])
def test_sizes_that_are_none(text):
    with pytest.raises(ValueError, match="size"):
        parse_sizes(text)


def test_sizes_are_written_as_they_are_read():
    for nbytes in (0, 4, 1023, 1024, 1536, 1 << 20, 3 << 30):
        assert parse_size(show(nbytes)) == nbytes


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--dtype", "float13"], "float32"),
        (["all_reduse"], "all_reduce"),
        (["--topology", "tree"], "order='tree'"),
        (["--topology", "mesh/relay"], "mesh/one_shot"),
        (["--sizes", "many"], "64K"),
        (["--decode-loop", "30"], "LAYERS,HIDDEN"),
        (["--peers", "nccl"], "gloo"),
    ],
)
def test_what_is_refused_is_refused_before_ranks_are_started(arguments, words):
    run = bench(*arguments)
    assert run.returncode == 2
    assert run.stderr.startswith("hostring-bench: ")
    assert words in run.stderr
    assert run.stderr.count("\n") == 1


def test_a_static_ring_is_what_is_measured(tmp_path: Path) -> None:
    """RING_CONFIG was ignored: ranks were started here, and something else was measured."""
    ports = free_ports(2)
    ranks = []
    for rank in range(2):
        ring = {"port": ports[rank], "right_ip": "127.0.0.1", "right_port": ports[1 - rank], "rank": rank}
        ring |= {"master_ip": "127.0.0.1" if rank else None, "master_port": ports[0], "world_size": 2}
        path = tmp_path / f"rank{rank}.json"
        path.write_text(json.dumps(ring), encoding="utf-8")
        command = [sys.executable, "-m", "hostring.bench", "--sizes", "4B", "--iterations", "2", "--rounds", "1"]
        env = {**os.environ, "RING_CONFIG": str(path)}
        ranks.append(subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=env))
    refused = subprocess.run(
        [*command, "-n", "3"], capture_output=True, text=True, timeout=60, env=env, check=False
    )  # while the two run: it must not meet them
    outputs = [rank.communicate(timeout=60)[0] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0], outputs
    assert "2 ranks" in outputs[0]
    assert refused.returncode == 2
    assert f"--ranks 3, but RING_CONFIG={path} says 2; leave out --ranks" in refused.stderr
