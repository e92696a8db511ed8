"""The Simulation Engine with its actors: runs that repeat, that lose a process, and that fail."""

from __future__ import annotations

import json
import os
import tempfile
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path

import pytest

from flwr_decentral.plugins import installed
from flwr_decentral.testing.superlink import FlowerRun, LocalSuperLink

from .waiting import wait_for

pytestmark = [
    pytest.mark.flower,
    *(
        pytest.mark.skipif(find_spec(module) is None, reason=f"{module} is not installed")
        for module in ("ray", "torch")
    ),
]

DICE = Path(__file__).parent / "apps" / "dice"
NODES = 4


@pytest.fixture(scope="module")
def superlink():
    # Each run is a process of its own, with a hash seed of its own.
    with LocalSuperLink(environ={"PYTHONHASHSEED": "random", "OMP_NUM_THREADS": "1"}) as superlink:
        yield superlink


@dataclass
class Outcome:
    """A run and its result, if it wrote one."""

    run: FlowerRun
    marks: Path
    result: dict = field(default_factory=dict)

    @property
    def fate(self):
        """What must not depend on where and how a run is done."""
        evaluations = [entry["metrics"] for entry in self.result["evaluations"]]
        return self.result["digest"], evaluations, self.result["virtual_time_s"]


@pytest.fixture(scope="module")
def roll(superlink, tmp_path_factory):
    """Run the app with changes to its config."""

    def run(actors=2, nodes=NODES, **config) -> Outcome:
        folder = tmp_path_factory.mktemp("dice")
        (marks := folder / "marks").mkdir()
        given = {key.replace("_", "-"): value for key, value in config.items()}
        done = superlink.run(
            DICE,
            run_config={"results-dir": str(folder), "marks": str(marks), **given},
            nodes=nodes,
            actors=actors,
        )
        outcome = Outcome(done, marks)
        for path in folder.glob("*.json"):
            outcome.result = json.loads(path.read_text())
        return outcome

    return run


@pytest.fixture(scope="module")
def reference(roll):
    outcome = roll(actors=1)
    assert outcome.run.completed, outcome.run.log
    return outcome


def test_models_are_trained_and_no_array_crosses_the_grid(reference):
    assert reference.result["status"] == "completed"
    assert reference.result["grid_array_bytes"] == 0
    assert len(list(reference.marks.glob("process-*"))) == 1
    (evaluation,) = reference.result["evaluations"]
    assert len(set(evaluation["metrics"]["checksum"]["nodes"])) == NODES


def test_another_seed_is_another_run(roll, reference):
    other = roll(seed=2)
    assert other.run.completed, other.run.log
    assert len(list(other.marks.glob("process-*"))) == 2
    for ours, theirs in zip(reference.fate[:2], other.fate[:2], strict=True):
        assert ours != theirs


def test_a_message_for_each_task_is_the_same_run(roll, reference):
    other = roll(dispatch="message", actors=1)
    assert other.run.completed, other.run.log
    assert other.fate == reference.fate
    assert other.result["dispatch"] == "message"


@pytest.mark.parametrize("dispatch", ["packed", "message"])
def test_an_actor_that_is_killed_while_it_trains_changes_nothing(dispatch, roll, reference):
    other = roll(dispatch=dispatch, die=True)
    assert (other.marks / "dead").exists()
    assert len(list(other.marks.glob("process-*"))) == 2
    assert other.run.completed, other.run.log
    assert other.result["lost_tasks"] >= 1
    assert other.fate == reference.fate


# --- real time ------------------------------------------------------------------------------------

TOGETHER = {"algorithm": "dpsgd", "topology": "complete"}


def test_nodes_that_gossip_by_themselves_end_with_the_models_of_virtual_time(roll):
    real, virtual = (roll(nodes=2, real_time=choice, **TOGETHER) for choice in (True, False))
    assert real.run.completed, real.run.log
    assert real.result["dispatch"] == "sidecar"
    assert real.result["bytes"]["sent"] > 0
    assert real.result["grid_array_bytes"] == 0
    assert [entry["metrics"] for entry in real.result["evaluations"]] == virtual.fate[1]


def test_more_nodes_in_real_time_than_actors_are_refused(roll):
    outcome = roll(nodes=3, real_time=True, **TOGETHER)
    assert outcome.run.status == "finished:failed"
    assert "3 virtual nodes cannot gossip in real time" in outcome.run.log
    assert "the engine runs 2 at once" in outcome.run.log


# --- runs that fail -------------------------------------------------------------------------------


def test_a_run_fails_when_all_actors_are_dead(roll):
    outcome = roll(die=True, actors=1)
    assert (outcome.marks / "dead").exists()
    assert outcome.run.status == "finished:failed"
    assert "no client process" in outcome.result["status"]


def test_an_unknown_algorithm_fails_the_run_and_says_what_there_is(roll):
    outcome = roll(algorithm="divshar")
    assert outcome.run.status == "finished:failed"
    assert "there is no algorithm 'divshar'; did you mean 'divshare'?" in outcome.run.log
    assert f"Installed are: {', '.join(sorted(installed()))}" in outcome.run.log


def test_a_client_that_always_raises_fails_the_run(roll):
    outcome = roll(fail=True)
    assert outcome.run.status == "finished:failed"
    assert f"training failed on all {NODES} nodes in their first round" in outcome.run.log
    assert "ValueError: told to fail" in outcome.run.log
    assert outcome.result["status"].startswith("failed: [runtime]")


# --- a run that is stopped ------------------------------------------------------------------------


def our_files() -> set[Path]:
    folders = (Path("/dev/shm"), Path(tempfile.gettempdir()))
    return {path for folder in folders for path in folder.glob("*flwr-decentral*")}


def users_of_our_memory() -> set[int]:
    """Find the processes that map an arena."""
    found = set()
    for process in Path("/proc").iterdir():
        if process.name.isdigit() and int(process.name) != os.getpid():
            try:
                maps = (process / "maps").read_text()
            except OSError:
                continue  # it has just ended, or is another user's
            if "flwr-decentral-arena" in maps:
                found.add(int(process.name))
    return found


def test_a_run_that_is_stopped_leaves_no_file_and_no_process(superlink, tmp_path):
    files, processes = our_files(), users_of_our_memory()
    run = superlink.run(
        DICE,
        run_config={
            "results-dir": str(tmp_path),
            "marks": str(tmp_path),
            "num-server-rounds": 1000,
            "seconds": 0.2,
        },
        nodes=NODES,
        actors=2,
        stream=False,
    )
    wait_for(lambda: any(tmp_path.glob("process-*")), 120.0)
    assert users_of_our_memory() - processes
    assert superlink.stop(run).status == "finished:stopped"
    assert our_files() == files
    wait_for(lambda: users_of_our_memory() <= processes, 60.0)
    assert our_files() == files
