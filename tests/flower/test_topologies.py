"""Whoever names an algorithm and a topology gets a run, or is told why not and what to do."""

from __future__ import annotations

import logging
import re

import numpy as np
import pytest

from flwr_decentral.core import ConfigurationError
from flwr_decentral.plugins import SHELF

from .toys import federate, make_client

pytestmark = pytest.mark.slow

SUITABLE = {"relaysgd": ("chain", "star", "binary-tree")}
UNSUITABLE = {
    "a2cid2": ({"topology": "complete"}, "a2cid2 gains nothing.* Take a sparser one, such as a"),
    "adpsgd": (
        {"topology": "ring", "adpsgd.scheme": "bipartite"},
        r"\[configuration\] scheme='bipartite' needs a topology without odd cycles.*Take an even",
    ),
    "adpsgd-divshare": ({"topology": "empty"}, "the topology has no links.*choose another"),
    "allreduce": ({"topology": "star"}, "some node is the only way .* share the work on a ring"),
    "divshare": (
        {"topology": "ring"},
        "degree 6 is more than some node has neighbors, 2:.* Take a denser topology",
    ),
    "dpsgd": ({"topology": "empty"}, "the topology has no links.*choose another"),
    "local": ({"topology": "ring"}, "the links of the topology have no effect"),
    "relaysgd": (
        {"topology": "ring"},
        r"\[configuration\] relaysgd relays sums along a tree.*is a cycle\. Use a topology that",
    ),
    "swift": ({"topology": "empty"}, "the topology has no links.*choose another"),
    "swift-divshare": (
        {"topology": "ring"},
        "degree 6 is more than some node has neighbors, 2:.* Take a denser topology",
    ),
}


def run(name, nodes, **config):
    model = {"w": np.zeros(40, np.float32)}
    return federate(make_client(), nodes, 3, algorithm=name, initial=model, run_config=config).run


@pytest.mark.parametrize("name", SHELF)
def test_an_algorithm_runs_on_what_suits_it(name):
    for topology in SUITABLE.get(name, ("ring", "star", "grid")):
        result = run(name, 4, topology=topology)
        assert result.status == "completed"
        assert (result.bytes.sent > 0) == (name != "local")


@pytest.mark.parametrize("name", SHELF)
def test_what_does_not_suit_it_is_refused_or_warned_of(name, caplog):
    config, text = UNSUITABLE[name]
    if r"\[configuration\]" in text:
        with pytest.raises(ConfigurationError, match=text):
            run(name, 11, **config)
        return
    assert run(name, 11, **config).status == "completed"
    told = [entry.message for entry in caplog.records if entry.levelno == logging.WARNING]
    assert any(re.search(text, message) for message in told), told
