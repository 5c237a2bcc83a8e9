"""Rules in `topology=`: which schedules they allow, and that all ranks must have the same."""

from __future__ import annotations

import pytest
from ranks import side_by_side, successes

import hostring
from hostring.engine.choice import Tuner
from hostring.errors import HandshakeError
from hostring.topologies.rules import read_rules

pytestmark = pytest.mark.usefixtures("no_file_of_the_user")


@pytest.mark.parametrize(
    ("text", "links", "all_reduce", "broadcast"),
    [
        ("auto", "mesh", {"mesh", "ring", "star", "dissemination"}, {"mesh", "ring", "star", "tree", "dissemination"}),
        ("ring", "ring", {"ring"}, {"ring"}),
        ("all_reduce:mesh;broadcast:star", "mesh", {"mesh"}, {"star"}),
        (" Broadcast : ring , star ; ", "mesh", {"mesh", "ring", "star", "dissemination"}, {"ring", "star"}),
        (
            "broadcast:^star",
            "mesh",
            {"mesh", "ring", "star", "dissemination"},
            {"mesh", "ring", "tree", "dissemination"},
        ),
        ("all_reduce:^star;broadcast:mesh", "mesh", {"mesh", "ring", "dissemination"}, {"mesh"}),
        ("mesh;all_reduce:ring/chain", "mesh", {"ring"}, {"mesh"}),
        ("star;broadcast:star", "star", {"star"}, {"star"}),
    ],
)
def test_rules(text, links, all_reduce, broadcast):
    rules = read_rules(text, "rank")
    assert rules.links == links
    assert {t for t, _ in rules.allowed("all_reduce", "rank", 4)} == all_reduce
    assert {t for t, _ in rules.allowed("broadcast", "rank", 4)} == broadcast


def test_a_rule_may_name_a_variant():
    assert read_rules("all_reduce:mesh/two_shot", "rank").allowed("all_reduce", "rank", 4) == [("mesh", "two_shot")]
    assert ("mesh", "two_shot") not in read_rules("all_reduce:^mesh/two_shot", "rank").allowed("all_reduce", "rank", 4)


@pytest.mark.parametrize(
    ("text", "order", "words"),
    [
        ("mush", "rank", "mesh, ring, star, tree"),
        ("mesh;ring", "rank", "twice, mesh and ring"),
        ("all_reduse:mesh", "rank", "all_reduce"),
        ("all_reduce:mush", "rank", "'mush' is unknown"),
        ("all_reduce:mesh/chain", "rank", "use mesh/one_shot, mesh/two_shot"),
        ("all_reduce:mesh;all_reduce:ring", "rank", "two rules for all_reduce"),
        ("all_reduce:tree", "rank", "use order='tree'"),
        ("all_reduce:ring/chain", "tree", "use ring/relay"),
        ("all_reduce:^mesh,ring,star,dissemination", "rank", "excludes everything"),
        ("tree", "rank", "order='tree'"),
        ("all_reduce:", "rank", "'' is unknown"),
    ],
)
def test_rules_that_cant_be_followed_say_what_can(text, order, words):
    with pytest.raises(ValueError, match=r"topology|order") as caught:
        read_rules(text, order)
    assert words in str(caught.value)


def test_a_rule_for_links_that_are_not_there_is_refused():
    with pytest.raises(ValueError, match="ring of 4 ranks doesn't have"):
        Tuner("ring;all_reduce:star", "rank", 4)
    assert Tuner("ring;all_reduce:star", "rank", 3).allowed["all_reduce"] == [("star", "stream")], (
        "a ring of three has all links"
    )


def test_the_environment_takes_rules_too(run_ranks, monkeypatch):
    monkeypatch.setenv("HOSTRING_TOPOLOGY", "all_reduce:mesh/two_shot;broadcast:star")
    for names in run_ranks(
        3, lambda comm: [comm.session.tuner.choose(c, 64, 4).name for c in ("all_reduce", "broadcast", "all_gather")]
    ):
        assert names == ["mesh/two_shot", "star", "mesh"]


def test_ranks_with_different_rules_refuse_each_other(run_ranks):
    from hostring.rendezvous import MemoryStore

    store, rules = MemoryStore(), ["all_reduce:mesh/one_shot", "all_reduce:mesh/two_shot"]

    def join(rank):
        with pytest.raises(HandshakeError, match="topology"):
            hostring.init(rank, 2, store=store, transport="memory", topology=rules[rank], timeout=10.0)

    successes(side_by_side([lambda: join(0), lambda: join(1)]))
