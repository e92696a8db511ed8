"""The digits app with every algorithm of the shelf by its name, on the Simulation Engine."""

from __future__ import annotations

import shutil
from importlib.util import find_spec

import pytest

from flwr_decentral.plugins import SHELF
from flwr_decentral.testing.superlink import LocalSuperLink

from .shelf import DIGITS, run_each

pytestmark = [
    pytest.mark.flower,
    *(
        pytest.mark.skipif(find_spec(module) is None, reason=f"{module} is not installed")
        for module in ("ray", "torch", "sklearn", "flwr_datasets")
    ),
]

ALONE = "local"
NODES, ROUNDS = 8, 12


@pytest.fixture(scope="module")
def superlink():
    with LocalSuperLink(environ={"OMP_NUM_THREADS": "1"}) as superlink:
        yield superlink


@pytest.fixture(scope="module")
def results(tmp_path_factory, superlink) -> dict[str, dict]:
    """Run every algorithm in one run, and read what each has written."""
    configs = [{"algorithm": name} for name in SHELF]
    found = run_each(
        superlink,
        tmp_path_factory.mktemp("every"),
        configs,
        nodes=NODES,
        rounds=ROUNDS,
        actors=1,
        timeout=600.0,
    )
    return {result["algorithm"]: result for result in found}


@pytest.mark.parametrize("name", SHELF)
def test_every_algorithm_learns_together_what_nobody_learns_alone(name, results):
    result, alone = results[name], results[ALONE]
    assert result["status"] == "completed"
    assert result["grid_array_bytes"] == 0
    if name == ALONE:
        assert result["bytes"]["sent"] == 0
        return
    ours, floor = result["evaluations"][-1], alone["evaluations"][-1]
    # A node that has just trained on its own few digits may look little better than alone; what
    # all have achieved is in the average of their models.
    assert ours["averaged"]["accuracy"] > floor["averaged"]["accuracy"] + 0.1
    assert ours["metrics"]["accuracy"]["mean"] > floor["metrics"]["accuracy"]["mean"]


def test_a_topology_that_an_algorithm_cannot_use_is_refused_with_what_to_do(superlink, tmp_path):
    app = tmp_path / "digits"
    shutil.copytree(DIGITS, app, ignore=shutil.ignore_patterns("__pycache__"))
    config = {"algorithm": "relaysgd", "topology": "ring", "results-dir": str(tmp_path / "results")}
    done = superlink.run(app, run_config=config, nodes=NODES, actors=1, timeout=300.0)
    assert done.status == "finished:failed"
    assert "relaysgd relays sums along a tree" in done.log
    assert "tree='spanning'" in done.log
