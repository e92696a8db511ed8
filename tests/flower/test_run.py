"""A whole run, once with each dispatcher: what crosses the grid, what clients see, what is left."""

from __future__ import annotations

import json
import os
import threading
from collections import Counter, defaultdict
from pathlib import Path

import numpy as np
import pytest
from flwr.app import Message, MessageType, RecordDict

from flwr_decentral.core import ConfigurationError, RuntimeFault
from flwr_decentral.report import RunResult

from . import toys
from .inprocess import task_identity
from .toys import federate, make_client, node_of, round_of, to_arrays
from .watching import MODEL, NODES, ROUNDS, CountingGrid, Observed, observe, open_things


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> dict[str, Observed]:
    return {
        name: observe(tmp_path_factory.mktemp(name), dispatch=name)
        for name in ("packed", "message")
    }


@pytest.fixture
def run(runs, dispatch) -> Observed:
    return runs[dispatch]


# --- what crosses the grid ------------------------------------------------------------------------


def test_no_array_crosses_the_grid(run):
    assert run.grid.array_bytes == 0
    assert run.result.run.grid_array_bytes == 0
    # Nor does a model in disguise: all that crosses is smaller than one model.
    assert 0 < run.grid.other_bytes < MODEL["w"].nbytes
    trains = run.grid.messages["pushed", "train"]
    assert run.grid.messages["pulled", "train"] == trains


def test_the_counting_grid_can_count():
    grid = CountingGrid(None)

    with task_identity():
        message = Message(RecordDict({"arrays": toys.to_record(MODEL)}), 1, MessageType.TRAIN)
    grid.count("pushed", [message])
    assert grid.array_bytes >= MODEL["w"].nbytes


def test_packed_needs_a_handful_of_messages(runs):
    hello, evaluations = NODES, NODES * (ROUNDS // 2) + 1
    packed, message = (runs[name].grid.messages for name in ("packed", "message"))
    assert message["pushed", "train"] == hello + NODES * ROUNDS
    assert message["pushed", "evaluate"] == packed["pushed", "evaluate"]
    assert packed["pushed", "evaluate"] >= evaluations
    # A host for each node at most, and anew after each of the two evaluations before the end.
    assert packed["pushed", "train"] <= hello + 3 * NODES


# --- one run, two ways ----------------------------------------------------------------------------


def test_both_dispatchers_do_the_same_run(runs):
    packed, message = runs["packed"], runs["message"]
    assert packed.result.run.digest == message.result.run.digest
    assert packed.final_models == message.final_models
    assert len(set(packed.final_models)) == NODES
    assert packed.averages == message.averages
    for name in packed.result.arrays:
        assert packed.result.arrays[name].data == message.result.arrays[name].data
    assert packed.result.run.evaluations == message.result.run.evaluations
    assert packed.result.train_metrics_clientapp == message.result.train_metrics_clientapp


class OutstandingGrid(CountingGrid):
    """Know how many tasks are out; those who are asked who they are come first."""

    def __init__(self, grid) -> None:
        super().__init__(grid)
        self.out: set[str] = set()
        self.most = 0

    def push_messages(self, messages):
        messages = list(messages)
        ids = list(super().push_messages(messages))
        if (
            self.messages["pushed", "train"] > NODES
            and messages[0].metadata.message_type == "train"
        ):
            self.out |= set(ids)
            self.most = max(self.most, len(self.out))
        return ids

    def pull_messages(self, message_ids):
        replies = super().pull_messages(message_ids)
        self.out -= {reply.metadata.reply_to_message_id for reply in replies}
        return replies


def test_few_messages_are_out_at_once_and_the_run_is_the_same(tmp_path, monkeypatch, runs):
    monkeypatch.setattr("flwr_decentral.flower.dispatch._IN_FLIGHT", 2)
    grids = []

    def wrap(grid):
        grids.append(OutstandingGrid(grid))
        return grids[-1]

    few = observe(tmp_path, dispatch="message", wrap=wrap)
    assert grids[-1].most == 2
    assert few.result.run.digest == runs["message"].result.run.digest


def test_both_write_the_same_transcript(runs):
    texts = {
        (run.folder / f"{run.result.run.name}.transcript").read_text() for run in runs.values()
    }
    assert len(texts) == 1
    assert "TrainDone" in texts.pop()


def test_clients_see_the_same_with_both_dispatchers(runs):
    packed, message = runs["packed"].calls, runs["message"].calls
    assert packed.keys() == message.keys()
    for key, calls in packed.items():
        for ours, theirs in zip(calls, message[key], strict=True):
            assert ours.content == theirs.content
            assert ours.config == theirs.config
            assert ours.state == theirs.state
            assert ours.model == theirs.model
            # Flower draws node ids anew for each run.
            for mine, its, of_the_run in (
                (ours.metadata, theirs.metadata, {"dst_node_id"}),
                (ours.context, theirs.context, {"node_id"}),
            ):
                assert {k: v for k, v in mine.items() if k not in of_the_run} == {
                    k: v for k, v in its.items() if k not in of_the_run
                }


@pytest.mark.slow
def test_the_seed_decides_the_run(runs, tmp_path):
    reference = runs["packed"]
    again = observe(tmp_path, workers=1)
    assert again.result.run.digest == reference.result.run.digest
    assert again.final_models == reference.final_models
    other = observe(tmp_path, seed=2)
    assert other.result.run.digest != reference.result.run.digest
    assert other.final_models != reference.final_models


# --- what clients see -----------------------------------------------------------------------------


def test_each_node_trains_each_round_once(run):
    expected = {("train", node, round) for node in range(NODES) for round in range(1, ROUNDS + 1)}
    trains = {key: len(calls) for key, calls in run.calls.items() if key[0] == "train"}
    assert trains == dict.fromkeys(expected, 1)


def test_a_message_is_what_flower_would_have_sent_to_that_node(run):
    ids = defaultdict(set)
    for (kind, node, _), calls in run.calls.items():
        for call in calls:
            assert call.content == ("arrays", "config")
            assert call.metadata["message_type"] == kind
            assert call.metadata["dst_node_id"] == call.context["node_id"]
            assert call.metadata["reply_to_message_id"] == ""
            assert call.metadata["run_id"] == call.context["run_id"]
            assert call.context["node_config"] == {"partition-id": node, "num-partitions": NODES}
            assert call.context["run_config"] == {"local-epochs": 3}
            ids[node].add(call.context["node_id"])
    # Evaluations are messages of Flower's own with both dispatchers, so these ids are Flower's.
    assert all(len(found) == 1 for found in ids.values())
    assert len({found.pop() for found in ids.values()}) == NODES


def test_the_config_says_round_seed_and_time_beside_what_the_user_gave(run):
    seeds = {}
    for (kind, node, round), calls in run.calls.items():
        for call in calls:
            given = {"learning-rate": 0.5} if kind == "train" else {"batches": 7}
            added = {"server-round", "seed", "virtual-time"}
            assert call.config.keys() == {*given, *added}
            assert given.items() <= call.config.items()
            assert call.config["server-round"] == round
            assert 0 <= call.config["seed"] < 2**31
            if kind == "train":
                seeds[node, round] = call.config["seed"]
                assert call.config["virtual-time"] == pytest.approx(round - 1, abs=0.5)
    assert len(set(seeds.values())) == NODES * ROUNDS


def test_state_stays_with_its_node_and_evaluation_sees_it(run):
    for (kind, _, round), calls in run.calls.items():
        for call in calls:
            remembered = round - 1 if kind == "train" else None
            if kind == "train":
                assert call.state == ({"memory": {"round": remembered}} if remembered else {})
            else:
                # Trainings that started before the evaluation have ended for real by then.
                assert call.state["memory"]["round"] in (round, round + 1)
    last = [run.calls["evaluate", node, ROUNDS][-1].state for node in range(NODES)]
    assert last == [{"memory": {"round": ROUNDS}}] * NODES


# --- what is left ---------------------------------------------------------------------------------


def test_sockets_and_memory_are_gone(run):
    assert run.open_meanwhile["memory"] >= 1
    assert run.open_meanwhile["sockets"] >= 1
    assert run.open_before == run.open_after == Counter(memory=0, sockets=0)
    assert run.threads_after == 0


def test_the_result_is_written_with_all_that_is_documented(run):
    name = run.result.run.name
    assert [path.name for path in run.result.files] == [
        f"{name}.json",
        f"{name}.csv",
        f"{name}.transcript",
    ]
    assert all(path.parent == run.folder for path in run.result.files)
    document = json.loads(run.result.files[0].read_text())
    assert document["algorithm"] == "divshare"
    assert document["parameters"]["fragments"] == 5
    assert document["seed"] == 1
    assert document["nodes"] == NODES
    assert document["rounds"] == ROUNDS
    assert document["digest"] == run.result.run.digest
    assert document["grid_array_bytes"] == 0
    assert document["status"] == "completed"
    assert document["bytes"].keys() == {"sent", "useful", "wasted", "dropped"}
    assert document["bytes"]["sent"] > NODES * MODEL["w"].nbytes
    assert document["bytes"]["sent"] >= document["bytes"]["useful"] + document["bytes"]["wasted"]
    assert [entry["round"] for entry in document["evaluations"]] == [2, 4]
    for entry in document["evaluations"]:
        assert entry.keys() == {
            "virtual_time_s",
            "round",
            "metrics",
            "averaged",
            "consensus_distance",
        }
        assert entry["metrics"]["mean"].keys() == {"mean", "worst", "std", "nodes"}
        assert len(entry["metrics"]["mean"]["nodes"]) == NODES
        assert entry["averaged"].keys() == {"mean"}
        assert entry["consensus_distance"] > 0
    assert RunResult.from_json(run.result.files[0].read_text()).digest == run.result.run.digest


def test_nothing_but_the_results_is_left_in_the_folder(run):
    assert sorted(run.folder.iterdir()) == sorted(run.result.files)


# --- other bounds and sizes -----------------------------------------------------------------------


def test_a_duration_bounds_a_run(dispatch):
    rounds = defaultdict(list)

    def train(msg, context):
        rounds[node_of(context)].append(round_of(msg))
        return toys.train(msg, context)

    # Nodes 0 and 1 take a second for a round, node 2 takes two.
    config = {"compute.seconds": 1.0, "duration": 4.5}
    (factors := Path(os.environ["FLWR_HOME"]) / "factors.json").write_text("[1.0, 1.0, 2.0]")
    result = federate(
        make_client(train),
        rounds=99,
        run_config={**config, "compute.factors": str(factors)},
        dispatch=dispatch,
    )
    assert rounds == {0: [1, 2, 3, 4], 1: [1, 2, 3, 4], 2: [1, 2]}
    assert result.run.virtual_time_s == 4.5
    assert result.run.evaluations[-1].virtual_time_s == 4.5


@pytest.mark.parametrize("nodes", [1, 2, 3])
@pytest.mark.parametrize("algorithm", ["local", "dpsgd"])
def test_few_nodes(algorithm, nodes):
    topology = "complete" if algorithm == "dpsgd" else ""
    config = {"topology": topology}
    result = federate(make_client(), nodes, 2, algorithm=algorithm, run_config=config)
    assert result.run.nodes == nodes
    assert result.run.status == "completed"
    # Each round goes halfway to i + 1: three quarters after two, averaged or not.
    expected = 0.75 * np.mean(np.arange(nodes) + 1)
    assert to_arrays(result.arrays)["w"] == pytest.approx(expected)


def test_a_run_says_what_it_is_going_to_do(caplog):
    federate(make_client(), algorithm="dpsgd", rounds=1, seed=3, weighted_by_key="num-examples")
    for line in (
        "\t├──> Algorithm: dpsgd(",
        "\t├──> Topology: ring",
        "\t│\t└── seed: 3",
        "\t\t├── Weighted by: 'num-examples'",
        "Decentralized training finished: ",
    ):
        assert line in caplog.text


def test_a_folder_that_cannot_be_written_to_is_refused_before_the_run(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(ConfigurationError, match=r"cannot be written to .*file.*results-dir"):
        federate(make_client(never), results_dir=tmp_path / "file")


def never(msg, context):
    pytest.fail("nothing is to be trained")


def test_what_can_hardly_have_been_meant_is_warned_of(caplog):
    federate(make_client(), run_config={"compute.stragglers": 0.5}, rounds=1)
    assert "compute.slowdown is 1" in caplog.text


def test_a_run_without_rounds_is_refused():
    with pytest.raises(ConfigurationError, match="num_rounds must be at least 1, got 0"):
        federate(make_client(), rounds=0)


@pytest.mark.slow
def test_a_client_that_takes_too_long_fails_the_run(dispatch, tmp_path):
    release = threading.Event()

    def train(msg, context):
        if node_of(context) == 1:
            release.wait(60.0)
        return toys.train(msg, context)

    with pytest.raises(RuntimeFault, match=r"waiting for .*node 1 \(round 1\).* Allow more"):
        federate(
            make_client(train),
            dispatch=dispatch,
            results_dir=tmp_path,
            start={"timeout": 0.05},
            after=release.set,
        )
    (document,) = [json.loads(path.read_text()) for path in tmp_path.glob("*.json")]
    assert document["status"].startswith("failed: [runtime] no training has ended for 0.05 s")
    assert open_things() == Counter(memory=0, sockets=0)
