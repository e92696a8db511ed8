"""The digits app with every algorithm of the shelf on three topologies each, by `flwr run`."""

from __future__ import annotations

import json
import shutil
from importlib.util import find_spec
from pathlib import Path

import pytest

from flwr_decentral.plugins import SHELF
from flwr_decentral.testing.superlink import LocalSuperLink

from .test_topologies import SUITABLE

pytestmark = [
    pytest.mark.bench,  # takes minutes
    *(
        pytest.mark.skipif(find_spec(module) is None, reason=f"{module} is not installed")
        for module in ("ray", "torch", "sklearn", "flwr_datasets")
    ),
]

DIGITS = Path(__file__).parents[2] / "apps" / "digits"
NODES, ROUNDS = 8, 4
PAIRS = [
    (name, topology)
    for name in SHELF
    for topology in SUITABLE.get(name, ("ring", "star", "hypercube"))
]

EVERY = f"""
from flwr.serverapp import ServerApp

from digits_app import server_app

app = ServerApp()


@app.main()
def main(grid, context):
    for name, topology in {PAIRS!r}:
        context.run_config["algorithm"] = name
        context.run_config["topology"] = topology
        server_app.main(grid, context)
"""
"""The app's own ServerApp, with one pair after the other: an engine takes long to start."""


def test_every_algorithm_learns_on_three_topologies(tmp_path):
    app, folder = tmp_path / "digits", tmp_path / "results"
    shutil.copytree(DIGITS, app, ignore=shutil.ignore_patterns("__pycache__"))
    (app / "digits_app" / "every.py").write_text(EVERY)
    project = app / "pyproject.toml"
    project.write_text(project.read_text().replace("server_app:app", "every:app"))
    config = {
        "num-server-rounds": ROUNDS,
        "evaluate-every": ROUNDS,
        "results-dir": str(folder),
    }
    with LocalSuperLink(environ={"OMP_NUM_THREADS": "1"}) as superlink:
        done = superlink.run(app, run_config=config, nodes=NODES, actors=2, timeout=1200.0)
    assert done.status == "finished:completed", done.log
    found = [json.loads(path.read_text()) for path in folder.glob("*.json")]
    assert len(found) == len(PAIRS)
    assert {(each["algorithm"], each["topology"]) for each in found} == set(PAIRS)
    for result in found:
        assert result["status"] == "completed"
        assert result["grid_array_bytes"] == 0
        assert result["evaluations"][-1]["metrics"]["accuracy"]["mean"] > 0.15  # by chance: 0.1
