"""What runtimes hold machines to."""

import re

import networkx as nx
import numpy as np
import pytest

from flwr_decentral.core import AlgorithmError, Capabilities, Layout, Report
from flwr_decentral.core.conduct import Tally, check_fit, check_send, check_train, counters
from flwr_decentral.testing.toys import Gossip


@pytest.mark.parametrize(
    ("state", "breach"),
    [
        ({"in_flight": 4}, "while round 4 is in flight"),
        ({"last": 5}, "after round 5"),
        ({"last": 6}, "after round 6"),
        ({"halted": True}, "after it has halted"),
        ({"in_flight": 0, "last": 5, "halted": True}, "while round 0 is in flight"),
    ],
)
def test_a_training_that_is_not_due_is_refused(state, breach):
    with pytest.raises(AlgorithmError, match=f"mine asks node 2 to train round 5 {breach}"):
        check_train("mine", 2, 5, **({"in_flight": None, "last": 4, "halted": False} | state))


def test_rounds_ascend_and_may_be_skipped():
    for round in (5, 6, 100):
        check_train("mine", 2, round, in_flight=None, last=4, halted=False)


def test_messages_go_to_neighbors():
    check_send("mine", nx.path_graph(3), 0, 1)
    for to in (0, 2, 9):
        with pytest.raises(AlgorithmError, match=f"mine on node 0 sends to {to}, which is no nei"):
            check_send("mine", nx.path_graph(3), 0, to)


def test_reports_add_up():
    tally = Tally()
    tally.add(Report(name="staleness", total=3.0))
    tally.add(Report(name="staleness", count=2, total=1.5, nbytes=7))
    assert tally == Tally(3, 4.5, 7)
    assert counters({"b": tally, "a": Tally()}) == {
        "a": {"count": 0, "total": 0.0, "nbytes": 0},
        "b": {"count": 3, "total": 4.5, "nbytes": 7},
    }


class Silent(Gossip):
    capabilities = Capabilities(communicates=False)


@pytest.mark.parametrize(
    ("algorithm", "graph", "warnings"),
    [
        (Gossip(), nx.path_graph(3), ()),
        (Gossip(), nx.empty_graph(1), ("there is one node only, so gossip has nobody to.*more",)),
        (Gossip(), nx.empty_graph(3), ("has no links, so gossip exchanges.*another topology, or",)),
        (Silent(), nx.empty_graph(3), ()),
        (Silent(), nx.path_graph(3), ("gossip exchanges nothing, so the links .* have no effect",)),
    ],
)
def test_links_that_are_missing_or_not_used_are_warned_of(algorithm, graph, warnings):
    told = check_fit(algorithm, graph, Layout.of({"w": np.zeros(1, np.float32)}))
    assert len(told) == len(warnings)
    for text, pattern in zip(told, warnings, strict=True):
        assert re.search(pattern, text)
