"""The digits app with every algorithm of the shelf by its name, on the Simulation Engine."""

from __future__ import annotations

import json
import shutil
from importlib.util import find_spec
from pathlib import Path

import pytest

from flwr_decentral.plugins import SHELF
from flwr_decentral.testing.superlink import LocalSuperLink

pytestmark = [
    pytest.mark.flower,
    *(
        pytest.mark.skipif(find_spec(module) is None, reason=f"{module} is not installed")
        for module in ("ray", "torch", "sklearn", "flwr_datasets")
    ),
]

DIGITS = Path(__file__).parents[2] / "apps" / "digits"
ALONE = "local"
NODES, ROUNDS = 8, 12

EVERY = """
from flwr.serverapp import ServerApp

from digits_app import server_app
from flwr_decentral.plugins import SHELF

app = ServerApp()


@app.main()
def main(grid, context):
    for name in SHELF:
        context.run_config["algorithm"] = name
        server_app.main(grid, context)
"""
"""The app's own ServerApp, with one algorithm after the other: an engine takes long to start."""


@pytest.fixture(scope="module")
def superlink():
    with LocalSuperLink(environ={"OMP_NUM_THREADS": "1"}) as superlink:
        yield superlink


@pytest.fixture(scope="module")
def results(tmp_path_factory, superlink) -> dict[str, dict]:
    """Run every algorithm in one run, and read what each has written."""
    folder = tmp_path_factory.mktemp("results")
    app = tmp_path_factory.mktemp("app") / "digits"
    shutil.copytree(DIGITS, app, ignore=shutil.ignore_patterns("__pycache__"))
    (app / "digits_app" / "every.py").write_text(EVERY)
    project = app / "pyproject.toml"
    project.write_text(project.read_text().replace("server_app:app", "every:app"))
    config = {
        "num-server-rounds": ROUNDS,
        "evaluate-every": ROUNDS,
        "results-dir": str(folder),
    }
    done = superlink.run(app, run_config=config, nodes=NODES, actors=1, timeout=600.0)
    assert done.status == "finished:completed", done.log
    found = [json.loads(path.read_text()) for path in folder.glob("*.json")]
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
