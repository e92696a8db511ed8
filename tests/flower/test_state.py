"""What a node remembers in ``context.state``, and what becomes of it when a client fails."""

from __future__ import annotations

import json
from collections import defaultdict

import numpy as np
import pytest
from flwr.app import ConfigRecord, MetricRecord

from flwr_decentral.core import RuntimeFault

from . import toys
from .toys import answer, arrays_of, federate, make_client, node_of, round_of, to_arrays


def remembered(context) -> list[int]:
    return list(context.state["memory"]["rounds"]) if "memory" in context.state else []


def remember(context, round: int) -> None:
    context.state["memory"] = MetricRecord({"rounds": [*remembered(context), round]})


# --- memory ---------------------------------------------------------------------------------------


def test_evaluation_sees_the_state_and_may_change_it(dispatch):
    seen = defaultdict(list)

    def train(msg, context):
        seen[node_of(context)].append(remembered(context))
        remember(context, round_of(msg))
        return toys.train(msg, context)

    def evaluate(msg, context):
        seen[node_of(context)].append(remembered(context))
        remember(context, -round_of(msg))
        return toys.evaluate(msg, context)

    federate(make_client(train, evaluate), rounds=4, evaluate_every=2, dispatch=dispatch)
    # Algorithm "local" trains on at once, so round 3 has been done when round 2 is evaluated, and
    # evaluated is what it had not changed yet; the last evaluation follows the last round.
    for node in range(3):
        history = max(seen[node], key=len)
        assert [step for step in history if step > 0] == [1, 2, 3, 4]
        assert [step for step in history if step < 0] == [-2]
        assert all(history[: len(earlier)] == earlier for earlier in seen[node])
        assert len(seen[node]) == 6


@pytest.mark.slow
def test_a_state_larger_than_any_socket_takes_is_carried(dispatch):
    size = 2_000_000
    seen = []

    def train(msg, context):
        if "memory" in context.state:
            blob = context.state["memory"]["blob"]
            seen.append(blob == bytes([node_of(context), round_of(msg) - 1]) * size)
        blob = bytes([node_of(context), round_of(msg)]) * size
        context.state["memory"] = ConfigRecord({"blob": blob})
        return toys.train(msg, context)

    # Two nodes and one process: while one node's state comes in, the other's goes out.
    result = federate(
        make_client(train, None),
        nodes=2,
        workers=1,
        dispatch=dispatch,
        start={"timeout": 60.0},
    )
    assert seen == [True] * 4
    assert result.run.lost_tasks == 0


def test_a_node_may_forget(dispatch):
    seen = defaultdict(list)

    def train(msg, context):
        seen[node_of(context)].append(remembered(context))
        if round_of(msg) == 2:
            context.state.clear()
        else:
            remember(context, round_of(msg))
        return toys.train(msg, context)

    federate(make_client(train, None), nodes=2, rounds=4, dispatch=dispatch)
    assert seen == {0: [[], [1], [], [3]], 1: [[], [1], [], [3]]}


# --- failures -------------------------------------------------------------------------------------


def failing(failures: dict[int, set[int]], seen):
    """Make a train function that changes its state and then fails in some rounds of some nodes."""

    def train(msg, context):
        node, round = node_of(context), round_of(msg)
        seen[node].append(remembered(context))
        remember(context, round)
        if round in failures.get(node, ()):
            raise ValueError(f"no round {round} on node {node}")
        return toys.train(msg, context)

    return train


def test_a_failed_training_changes_neither_model_nor_state(dispatch, caplog):
    seen = defaultdict(list)
    train = failing({0: {2}, 1: {2, 3}, 2: {1}}, seen)
    result = federate(make_client(train), rounds=5, dispatch=dispatch)
    assert seen == {
        0: [[], [1], [1], [1, 3], [1, 3, 4]],
        1: [[], [1], [1], [1], [1, 4]],
        2: [[], [], [2], [2, 3], [2, 3, 4]],
    }
    assert result.run.train_failures == 4
    assert result.run.status == "completed"
    # Of five rounds, each of which goes half of the way to node + 1, some did not count.
    done = np.array([4, 3, 4])
    expected = np.mean((np.arange(3) + 1) * (1 - 0.5**done))
    assert to_arrays(result.arrays)["w"] == pytest.approx(expected)
    assert "Training failed on node 1, round 3:" in caplog.text
    assert "ValueError: no round 3 on node 1" in caplog.text
    assert 'raise ValueError(f"no round' in caplog.text


def test_both_dispatchers_agree_on_failures():
    digests = set()
    for dispatch in ("packed", "message"):
        train = failing({0: {2}, 1: {2, 3}}, defaultdict(list))
        result = federate(make_client(train), algorithm="dpsgd", dispatch=dispatch)
        assert result.run.train_failures == 3
        digests.add(result.run.digest)
    assert len(digests) == 1


@pytest.mark.parametrize(
    ("failures", "complaint"),
    [
        (
            {1: {2, 3, 4}},
            r"failed 3 times in a row on node 1, last in round 4:(?s:.*)no round 4 on",
        ),
        (
            {0: {1}, 1: {1}, 2: {1}},
            r"failed on all 3 nodes in their first round(?s:.*)no round 1 on",
        ),
    ],
    ids=["three-in-a-row", "all-in-their-first-round"],
)
def test_a_client_that_keeps_failing_fails_the_run(failures, complaint, dispatch, tmp_path):
    train = failing(failures, defaultdict(list))
    with pytest.raises(RuntimeFault, match=complaint):
        federate(make_client(train), rounds=6, dispatch=dispatch, results_dir=tmp_path)
    (path,) = tmp_path.glob("*.json")
    document = json.loads(path.read_text())
    assert document["status"].startswith("failed: [runtime] training failed")
    assert document["train_failures"] == 3
    assert document["nodes"] == 3


def test_a_failed_evaluation_leaves_the_node_out(dispatch, caplog):
    seen = []

    def evaluate(msg, context):
        seen.append(remembered(context))
        remember(context, -1)
        if node_of(context) == 1:
            raise ValueError("cannot evaluate")
        return toys.evaluate(msg, context)

    result = federate(make_client(evaluate=evaluate), dispatch=dispatch)
    for evaluation in result.run.evaluations:
        nodes = evaluation.metrics["mean"].nodes
        assert [value is None for value in nodes] == [False, True, False]
    assert "Evaluation failed on node 1" in caplog.text
    assert "ValueError: cannot evaluate" in caplog.text
    assert result.run.counters["evaluation-failed"]["count"] == len(result.run.evaluations)
    # What it had written before it failed is forgotten.
    assert sorted(seen) == sorted([[], [], [], [], [], [-1], [-1], [-1, -1], [-1, -1]])


# --- what a train function must return ------------------------------------------------------------


def test_what_is_no_trained_model_counts_as_a_failure(dispatch, caplog):
    def train(msg, context):
        arrays = toys.pulled(arrays_of(msg), node_of(context))
        if round_of(msg) != 2:
            return answer(msg, arrays)
        match node_of(context):
            case 0:
                return answer(msg, {"w": arrays["w"] * np.float32("nan")})
            case 1:
                return answer(msg, {"w": arrays["w"][:-1]})
            case 2:
                return answer(msg)
            case 3:
                return answer(msg, {"weights": arrays["w"]})
            case 4:
                return answer(msg, {"w": arrays["w"].astype(np.float64)})
            case _:
                return answer(msg, {"w": arrays["w"] + np.float32("inf")})

    result = federate(make_client(train), nodes=6, rounds=3, dispatch=dispatch)
    assert result.run.train_failures == 6
    for complaint in (
        "not finite",
        "tensor 'w' changed from (4,) float32 to (3,) float32",
        "must return its model as one ArrayRecord named 'arrays'",
        "missing ['w'], new ['weights']",
        "tensor 'w' changed from (4,) float32 to (4,) float64",
    ):
        assert complaint in caplog.text
    # Two rounds of three have counted.
    assert to_arrays(result.arrays)["w"] == pytest.approx(0.75 * 3.5)


def test_the_records_may_have_other_names(dispatch):
    seen = set()

    def train(msg, context):
        seen.add(tuple(msg.content))
        arrays = toys.pulled(toys.to_arrays(msg.content["model"]), node_of(context))
        # The only model in a reply needs no name that is agreed upon.
        return answer(msg, arrays)

    result = federate(
        make_client(train, None),
        dispatch=dispatch,
        arrayrecord_key="model",
        configrecord_key="settings",
    )
    assert seen == {("model", "settings")}
    assert result.run.train_failures == 0
