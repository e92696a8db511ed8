"""Deployments: a SuperLink with TLS and node authentication, SuperNodes, sidecars, ``flwr run``."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from flwr_decentral.report.results import RunResult
from flwr_decentral.testing.deployment import Deployment
from flwr_decentral.testing.keeper import processes_of

from .waiting import wait_for

pytestmark = [
    pytest.mark.flower,
    *(
        pytest.mark.skipif(find_spec(module) is None, reason=f"{module} is not installed")
        for module in ("flwr_datasets", "ray", "sklearn", "torch")
    ),
]

ROOT = Path(__file__).parents[2]
DICE = Path(__file__).parent / "apps" / "dice"
DIGITS = ROOT / "apps" / "digits"
TOOL = ROOT / "tools" / "deployment.py"


def test_four_supernodes_reach_what_virtual_time_predicts():
    done = subprocess.run(
        [
            *(sys.executable, str(TOOL), "--run", str(DIGITS), "--algorithms", "dpsgd"),
            *("--run-config", "num-server-rounds=20 evaluate-every=20", "--within", "0.03"),
        ],
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    row = done.stdout.strip().splitlines()[-1]
    name, rounds, real, virtual, _, grid, _ = (cell.strip() for cell in row.strip("|").split("|"))
    assert (name, rounds, grid) == ("dpsgd", "20", "0")
    # In lockstep both runs are the same one.
    assert real == virtual
    assert float(real) > 0.5
    homes = re.findall(r"^started .* in (/\S+)$", done.stdout, re.MULTILINE)
    assert len(homes) == 2
    for home in homes:
        assert not processes_of(Path(home))
        assert not Path(home).exists()


def test_ctrl_c_ends_all_of_it():
    command = [sys.executable, str(TOOL), "--nodes", "1"]
    tool = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        home = Path(re.search(r"everything is in (/\S+);", tool.stdout.readline())[1])
        assert len(processes_of(home)) >= 3, "a SuperLink, a SuperNode and a sidecar"
        tool.send_signal(signal.SIGINT)
        assert tool.wait(60) == 130
    finally:
        tool.kill()
        tool.wait(20)
        tool.stdout.close()
    assert not processes_of(home)
    assert not home.exists()


def test_a_new_run_goes_on_where_the_superlinks_end_cut_one_off(tmp_path):
    usual = {"algorithm": "dpsgd", "resume": "kept", "segment": 15.0, "evaluate-every": 10**6}
    with Deployment(2) as deployment:
        deployment.run(DICE, run_config={**usual, "num-server-rounds": 10**6}, stream=False)
        wait_for(lambda: deployment.status(1).get("counted", {}).get("rounds", 0) >= 5, 600)
        deployment.crash()
        deployment.restart()
        run = deployment.run(
            DICE, run_config={**usual, "num-server-rounds": 1, "results-dir": str(tmp_path)}
        )
        assert run.completed, run.log
        assert "Node 1 has gone on from the model kept as 'kept'" in run.log
        assert deployment.status(0)["kept"] == ["kept"]
    (path,) = tmp_path.glob("*.json")
    result = RunResult.from_json(path.read_text())
    assert result.rounds == 1
    # Each round adds 1.5 on average, and the initial model is zero.
    assert min(result.evaluations[-1].metrics["mean"].nodes) > 5 * 1.4
