"""Metrics: averaged as FedAvg would, spread over the nodes, and those of the averaged model."""

from __future__ import annotations

import threading
from collections import defaultdict

import numpy as np
import pytest
from flwr.app import MetricRecord, RecordDict

from flwr_decentral.core import ConfigurationError, to_seconds

from . import toys
from .toys import answer, arrays_of, federate, make_client, node_of, round_of, to_arrays

NODES, ROUNDS = 4, 3
EXAMPLES = np.array([1, 2, 3, 10])


def loss(node: int, round: int) -> float:
    return 1.0 / (round + node)


def train(msg, context):
    node, round = node_of(context), round_of(msg)
    reply = toys.train(msg, context)
    reply.content["metrics"] = MetricRecord(
        {"num-examples": int(EXAMPLES[node]), "loss": loss(node, round), "pair": [1.0, float(node)]}
    )
    return reply


def evaluate(msg, context):
    node = node_of(context)
    return answer(
        msg,
        **{"num-examples": int(EXAMPLES[node])},
        accuracy=float(arrays_of(msg)["w"].mean()),
        node=node,
    )


class Averages:
    """An evaluate_fn that remembers what it was given."""

    def __init__(self):
        self.rounds = []
        self.arrays = []

    def __call__(self, round, arrays):
        self.rounds.append(round)
        self.arrays.append(to_arrays(arrays)["w"])
        return MetricRecord({"mean": float(self.arrays[-1].mean())})


@pytest.fixture(scope="module")
def run():
    averages = Averages()
    result = federate(
        make_client(train, evaluate),
        NODES,
        ROUNDS,
        evaluate_every=1,
        start={"evaluate_fn": averages},
    )
    return averages, result


def models(round: int) -> np.ndarray:
    """Compute what each node's numbers are after some rounds of "local"."""
    return (np.arange(NODES) + 1) * (1 - 0.5**round)


def test_training_metrics_are_averages_by_examples(run):
    _, result = run
    weights = EXAMPLES / EXAMPLES.sum()
    assert list(result.train_metrics_clientapp) == [1, 2, 3]
    for round, record in result.train_metrics_clientapp.items():
        losses = [loss(node, round) for node in range(NODES)]
        assert record["loss"] == pytest.approx(weights @ losses)
        assert record["pair"] == pytest.approx([1.0, weights @ np.arange(NODES)])
        assert "num-examples" not in record


def test_evaluation_metrics_are_averages_by_examples(run):
    _, result = run
    assert list(result.evaluate_metrics_clientapp) == [1, 2, 3]
    for round, record in result.evaluate_metrics_clientapp.items():
        assert record["accuracy"] == pytest.approx(EXAMPLES @ models(round) / EXAMPLES.sum())


def test_an_evaluation_tells_each_node_the_mean_the_worst_and_the_spread(run):
    _, result = run
    for evaluation in result.run.evaluations:
        spread = evaluation.metrics["accuracy"]
        values = models(evaluation.round)
        assert spread.nodes == pytest.approx(values)
        assert spread.mean == pytest.approx(values.mean())
        assert spread.worst == pytest.approx(values.min())
        assert spread.std == pytest.approx(values.std())
        assert evaluation.metrics["node"].nodes == [0, 1, 2, 3]
        assert "num-examples" not in evaluation.metrics
        distances = (values - values.mean()) ** 2
        assert evaluation.consensus_distance == pytest.approx(4 * distances.mean())


def test_the_averaged_model_is_evaluated_before_and_at_each_evaluation(run):
    averages, result = run
    assert averages.rounds == [0, 1, 2, 3]
    for round, array in zip(averages.rounds, averages.arrays, strict=True):
        # The exact mean, rounded once.
        assert array.tobytes() == np.full(4, models(round).mean(), np.float32).tobytes()
    assert {
        round: record["mean"] for round, record in result.evaluate_metrics_serverapp.items()
    } == {round: models(round).mean() for round in range(4)}
    for evaluation in result.run.evaluations:
        assert evaluation.averaged == {"mean": models(evaluation.round).mean()}
    assert to_arrays(result.arrays)["w"].tobytes() == averages.arrays[-1].tobytes()


def test_the_average_is_summed_in_double_precision():
    def train(msg, context):
        value = [1e8, 1.0, 1.0, -1e8][node_of(context)]
        return answer(msg, {"w": np.full(4, value, np.float32)})

    averages = Averages()
    federate(make_client(train, None), NODES, 1, start={"evaluate_fn": averages})
    assert (averages.arrays[-1] == 0.5).all()


def test_evaluations_take_no_virtual_time(run):
    _, result = run
    assert [entry.virtual_time_s for entry in result.run.evaluations] == [1.0, 2.0, 3.0]
    assert result.run.virtual_time_s == 3.0


def test_a_run_that_ends_at_any_nanosecond_is_evaluated_once_at_its_end():
    # As a float, this many seconds times a billion is not this many nanoseconds.
    nanoseconds = 4_121_803_487_660
    assert to_seconds(nanoseconds) * 1e9 != nanoseconds
    averages = Averages()
    result = federate(
        make_client(),
        rounds=1,
        run_config={"compute.seconds": to_seconds(nanoseconds)},
        start={"evaluate_fn": averages},
    )
    assert averages.rounds == [0, 1]
    assert len(result.run.evaluations) == 1


# --- how metrics are averaged ---------------------------------------------------------------------


def test_the_users_own_averages_are_asked():
    calls = defaultdict(list)

    def summing(kind):
        def aggregate(contents, key):
            calls[kind].append((len(contents), key))
            assert all(isinstance(content, RecordDict) for content in contents)
            total = sum(content["metrics"]["weight"] for content in contents)
            return MetricRecord({"total": total})

        return aggregate

    def train(msg, context):
        return answer(msg, toys.pulled(arrays_of(msg), node_of(context)), weight=node_of(context))

    def evaluate(msg, context):
        return answer(msg, weight=10 * node_of(context))

    result = federate(
        make_client(train, evaluate),
        weighted_by_key="weight",
        train_metrics_aggr_fn=summing("train"),
        evaluate_metrics_aggr_fn=summing("evaluate"),
        evaluate_every=3,
    )
    assert calls == {"train": [(3, "weight")] * 3, "evaluate": [(3, "weight")]}
    assert {key: dict(value) for key, value in result.train_metrics_clientapp.items()} == {
        round: {"total": 3} for round in (1, 2, 3)
    }
    assert dict(result.evaluate_metrics_clientapp[3]) == {"total": 30}


def test_metrics_without_their_weight_are_refused():
    def train(msg, context):
        return answer(msg, toys.pulled(arrays_of(msg), node_of(context)))

    with pytest.raises(ConfigurationError, match="training round 1 lack 'weight'.*weighted_by_key"):
        federate(make_client(train), weighted_by_key="weight")


def test_no_examples_at_all_are_no_average(caplog):
    def train(msg, context):
        return answer(
            msg, toys.pulled(arrays_of(msg), node_of(context)), **{"num-examples": 0, "loss": 0.0}
        )

    result = federate(make_client(train, None), rounds=1)
    assert result.train_metrics_clientapp == {}
    assert "No node had any examples in training round 1" in caplog.text


def test_clients_need_not_return_metrics():
    def train(msg, context):
        reply = toys.train(msg, context)
        del reply.content["metrics"]
        return reply

    result = federate(make_client(train, None), rounds=1)
    assert result.train_metrics_clientapp == {}


def test_rounds_that_not_every_node_has_trained_are_averaged_at_the_end():
    def train(msg, context):
        if node_of(context) == 2 and round_of(msg) == 2:
            raise ValueError("not this time")
        return answer(
            msg, toys.pulled(arrays_of(msg), node_of(context)), loss=float(node_of(context))
        )

    result = federate(make_client(train, None))
    assert [record["loss"] for record in result.train_metrics_clientapp.values()] == [1.0, 0.5, 1.0]
    assert list(result.train_metrics_clientapp) == [1, 2, 3]


# --- who evaluates --------------------------------------------------------------------------------


def test_no_node_evaluates_where_no_share_does():
    called = threading.Event()

    def evaluate(msg, context):
        called.set()
        return toys.evaluate(msg, context)

    averages = Averages()
    result = federate(
        make_client(evaluate=evaluate), fraction_evaluate=0.0, start={"evaluate_fn": averages}
    )
    assert not called.is_set()
    assert averages.rounds == [0, 1, 2, 3]
    assert all(entry.metrics == {} for entry in result.run.evaluations)
    assert result.evaluate_metrics_clientapp == {}


def who_evaluates(**arguments) -> list[tuple[int, ...]]:
    result = federate(make_client(), nodes=6, rounds=6, evaluate_every=1, **arguments)
    return [
        tuple(n for n, value in enumerate(entry.metrics["mean"].nodes) if value is not None)
        for entry in result.run.evaluations
    ]


@pytest.mark.slow
def test_half_of_the_nodes_evaluate_each_time_others():
    chosen = who_evaluates(fraction_evaluate=0.5)
    assert [len(nodes) for nodes in chosen] == [3] * 6
    assert len(set(chosen)) > 1
    assert who_evaluates(fraction_evaluate=0.5, dispatch="message") == chosen
    assert who_evaluates(fraction_evaluate=0.5, seed=2) != chosen


def test_a_least_number_of_nodes_evaluates():
    chosen = who_evaluates(fraction_evaluate=0.5, min_evaluate_nodes=5)
    assert [len(nodes) for nodes in chosen] == [5] * 6


@pytest.mark.slow
def test_the_choice_of_nodes_does_not_change_the_run():
    what = {"algorithm": "divshare", "fragments": 2, "degree": 2}
    digests = {
        federate(make_client(), **what, nodes=6, fraction_evaluate=share).run.digest
        for share in (0.0, 0.5, 1.0)
    }
    assert len(digests) == 1


# --- evaluate_fn ----------------------------------------------------------------------------------


def test_evaluate_fn_may_return_nothing():
    result = federate(make_client(), start={"evaluate_fn": lambda round, arrays: None})
    assert result.evaluate_metrics_serverapp == {}
    assert all(entry.averaged == {} for entry in result.run.evaluations)


def test_evaluate_fn_must_return_a_record():
    with pytest.raises(ConfigurationError, match="must return a MetricRecord or None, got float"):
        federate(make_client(), start={"evaluate_fn": lambda round, arrays: 0.5})
