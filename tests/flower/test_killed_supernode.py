"""A SuperNode of a deployment is killed, and comes back."""

from __future__ import annotations

import re
from importlib.util import find_spec
from pathlib import Path

import pytest

from flwr_decentral.testing.deployment import Deployment

from .waiting import wait_for

pytestmark = [
    pytest.mark.bench,  # takes minutes: Flower misses a SuperNode after its second heartbeat
    *(
        pytest.mark.skipif(find_spec(module) is None, reason=f"{module} is not installed")
        for module in ("ray", "torch")
    ),
]

DICE = Path(__file__).parent / "apps" / "dice"


def test_a_supernode_that_is_killed_is_away_and_the_others_go_on():
    config = {
        "algorithm": "divshare",
        "num-server-rounds": 10**6,
        "evaluate-every": 10**6,
        "segment": 15.0,
        "seconds": 0.2,
    }
    with Deployment(3) as deployment:

        def rounds(*nodes: int) -> float:
            return min(deployment.status(node)["counted"]["rounds"] for node in nodes)

        def has_said(words: str):
            return lambda: words in deployment.log(run)

        run = deployment.run(DICE, run_config=config, stream=False)
        wait_for(has_said("3 of 3 nodes"), 300)
        deployment.kill_supernode(2)
        # Flower lets nobody take its place before it is missed.
        wait_for(has_said("2 of 3 nodes"), 300)
        before = rounds(0, 1)
        wait_for(lambda: rounds(0, 1) > before + 3, 120)
        before = rounds(2)
        deployment.start_supernode(2)
        wait_for(has_said("Node 2 is back"), 300)
        wait_for(lambda: rounds(2) > before + 3, 120)
        log = deployment.log(run)
        assert deployment.stop(run).finished
    assert re.search("Node 2 .* is away: its segment ended with .*Node Unavailable", log)
    assert "holds no model" not in log, "its sidecar has kept it"
    assert "is away" not in re.sub("Node 2 .*", "", log)
