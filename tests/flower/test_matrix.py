"""The digits app with every algorithm of the shelf on three topologies each, by `flwr run`."""

from __future__ import annotations

from importlib.util import find_spec

import pytest

from flwr_decentral.plugins import SHELF
from flwr_decentral.testing.superlink import LocalSuperLink

from .shelf import run_each
from .test_topologies import SUITABLE

pytestmark = [
    pytest.mark.bench,  # takes minutes
    *(
        pytest.mark.skipif(find_spec(module) is None, reason=f"{module} is not installed")
        for module in ("ray", "torch", "sklearn", "flwr_datasets")
    ),
]

NODES, ROUNDS = 8, 4
PAIRS = [
    (name, topology)
    for name in SHELF
    for topology in SUITABLE.get(name, ("ring", "star", "hypercube"))
]


def test_every_algorithm_learns_on_three_topologies(tmp_path):
    configs = [{"algorithm": name, "topology": topology} for name, topology in PAIRS]
    with LocalSuperLink(environ={"OMP_NUM_THREADS": "1"}) as superlink:
        found = run_each(
            superlink, tmp_path, configs, nodes=NODES, rounds=ROUNDS, actors=2, timeout=1200.0
        )
    assert len(found) == len(PAIRS)
    assert {(each["algorithm"], each["topology"]) for each in found} == set(PAIRS)
    for result in found:
        assert result["status"] == "completed"
        assert result["grid_array_bytes"] == 0
        assert result["evaluations"][-1]["metrics"]["accuracy"]["mean"] > 0.15  # by chance: 0.1
