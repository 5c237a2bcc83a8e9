"""`hostring plan topology` and `hostring tune`: what they say and write."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from hostring.commands.plan import change_from, parse_ranks, price_point, verdict
from hostring.cost.network import ethernet, from_links


def run(*arguments, **env):
    command = [sys.executable, "-m", "hostring.commands.cli", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=100, check=False, env={**os.environ, **env})


def row(sizes, order="rank", **links):
    return [price_point(from_links({"latency_us": 50, **links}, n), 1 << 22, order) for n in sizes]


def test_a_fast_hub_is_the_constraint_once_its_leaves_are_faster_together():
    """A hub with k times the rate of its leaves is full from k + 1 leaves on."""
    for k in (2, 3, 5):
        points = row(range(2, 9), gbit_per_s=0.1, ranks={"0": {"gbit_per_s": 0.1 * k}})
        active = [p.world_size for p in points if p.hub_active]
        assert active == list(range(k + 2, 9)), f"{k} leaves fill it, and the next one has to wait"


def test_then_another_topology_is_named_with_what_it_gains():
    points = row(range(2, 9), gbit_per_s=0.1, ranks={"0": {"gbit_per_s": 0.25}})
    change = change_from(points)
    assert change is not None
    assert change.best.topology == "mesh"
    words = " ".join(verdict(points))
    assert f"change topology to mesh/two_shot from {change.world_size} ranks on" in words
    assert "the hub is the active constraint of a star from 4 ranks on" in words


def test_a_hub_that_is_fast_enough_is_not_blamed():
    points = row(range(2, 6), gbit_per_s=0.1, ranks={"0": {"gbit_per_s": 10}})
    assert not any(p.hub_active for p in points)
    assert "is not the constraint up to 5 ranks" in verdict(points)[0]
    assert change_from(points) is None or change_from(points).world_size > 2


def test_on_equal_machines_every_hub_is_too_slow_for_large_messages():
    points = [price_point(ethernet(n), 1 << 22) for n in (3, 4, 8, 16, 32)]
    assert all(p.hub_active for p in points)
    assert all(p.hub[0] in ("in", "out") for p in points), "its interface, not its processor"
    stars = [p.offers["star"].seconds for p in points]
    assert stars == sorted(stars)
    assert stars[-1] > 5 * points[-1].best.seconds


def test_only_what_holds_the_order_is_priced():
    assert set(price_point(ethernet(4), 4096, "rank").offers) == {"mesh", "ring", "star", "dissemination"}
    assert set(price_point(ethernet(4), 4096, "tree").offers) == {"mesh", "ring", "star", "tree", "dissemination"}
    offers = price_point(ethernet(4), 4096, "any").offers
    assert offers["tree"].order == "tree"
    with pytest.raises(ValueError, match="--order 'best'"):
        price_point(ethernet(4), 4096, "best")


@pytest.mark.parametrize("text", ["", "1", "8..2", "2..x", "2..1000000"])
def test_ranges_of_ranks_that_are_none(text):
    with pytest.raises(ValueError, match="MIN"):
        parse_ranks(text)
    assert parse_ranks("2..32") == (2, 32)
    assert parse_ranks("8") == (8, 8)


def test_the_command_prints_prices_and_writes_them(tmp_path):
    (tmp_path / "links.json").write_text(
        '{"latency_us": 60, "gbit_per_s": 1, "ranks": {"0": {"gbit_per_s": 2.5}}}', encoding="utf-8"
    )
    out = tmp_path / "prices.json"
    files = ("--links", str(tmp_path / "links.json"), "--json", str(out))
    shown = run("plan", "topology", "--ranks", "2..6", "--sizes", "1M,4K", *files)
    assert shown.returncode == 0, shown.stderr
    assert "the hub is the active constraint of a star from 4 ranks on" in shown.stdout
    rows = json.loads(out.read_text(encoding="utf-8"))
    assert [(r["nbytes"], r["ranks"]) for r in rows] == [(n, r) for n in (4096, 1 << 20) for r in range(2, 7)]
    assert [r["hub_active"] for r in rows[5:]] == [False, False, True, True, True]
    for r in rows:
        assert r["best"] == min(r["offers"], key=lambda name: r["offers"][name]["seconds"])


def test_the_links_are_printed_and_that_prices_are_predicted(tmp_path):
    shown = run("plan", "topology", "--ranks", "2..3", "--sizes", "1M")
    assert "all prices are predicted, for links that are assumed" in shown.stdout
    assert "1 Gbit/s and 30 us between hosts" in shown.stdout
    (tmp_path / "links.json").write_text(
        '{"latency_us": 50, "gbit_per_s": 10, "ranks": {"0": {"send_gbit_per_s": 2.5}},'
        ' "links": [{"from": 0, "to": 2, "latency_us": 400, "gbit_per_s": 0.1}]}',
        encoding="utf-8",
    )
    shown = run("plan", "topology", "--ranks", "2..3", "--sizes", "1M", "--links", str(tmp_path / "links.json"))
    line = shown.stdout.splitlines()[0]
    assert line.startswith(f"all prices are predicted, for the links in {tmp_path / 'links.json'}: ")
    for words in ("10 Gbit/s and 50 us", "rank 0 sends 2.5 Gbit/s, receives 10 Gbit/s", "0 to 2 0.1 Gbit/s, 400 us"):
        assert words in line


def test_a_wrong_links_file_is_named(tmp_path):
    (tmp_path / "links.json").write_text('{"latency": 60}', encoding="utf-8")
    shown = run("plan", "topology", "--links", str(tmp_path / "links.json"))
    assert shown.returncode == 2
    assert "links.json: unknown key latency" in shown.stderr


def test_tuning_shows_a_matrix_and_saves_what_later_groups_use(tmp_path):
    quick = ("--ranks", "2", "--sizes", "64,16K", "--rounds", "1", "--seconds", "0.001", "--details", "--save")
    cache = str(tmp_path / "cache")
    shown = run("tune", *quick, XDG_CACHE_HOME=cache)
    assert shown.returncode == 0, shown.stderr
    for words in (
        "latency (us)",
        "chosen schedules: 2 ranks",
        "all_reduce",
        "broadcast",
        "predicted (us)",
        "over the best",
        "saved to",
    ):
        assert words in shown.stdout
    (saved,) = (tmp_path / "cache" / "hostring").iterdir()
    assert json.loads(saved.read_text(encoding="utf-8"))["source"].startswith("hostring tune of ")
    script = tmp_path / "script.py"
    script.write_text(
        "import hostring\nwith hostring.init() as comm:\n    print(comm.session.tuner.source)\n", encoding="utf-8"
    )
    used = run("launch", "-n", "2", str(script), XDG_CACHE_HOME=cache)
    assert used.stdout.count("hostring tune of ") == 2, used.stdout + used.stderr
