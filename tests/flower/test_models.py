"""Models of many kinds of tensors: what is averaged, what stays on its node, what never changes."""

from __future__ import annotations

from collections import defaultdict

import numpy as np
import pytest

from flwr_decentral.core import ConfigurationError

from .toys import answer, arrays_of, federate, make_client, node_of, to_arrays

NODES, ROUNDS = 3, 2
MODEL = {
    "w": np.zeros((2, 3), np.float32),
    "half": np.zeros(3, np.float16),
    "scale": np.array(0, np.float32),
    "double": np.zeros(2, np.float64),
    "bn.running_mean": np.zeros(2, np.float32),
    "bn.running_var": np.ones(2, np.float32),
    "bn.num_batches_tracked": np.array(0),
    "mask": np.array([True, False]),
}
SHARED = ("w", "half", "scale", "double")
STEPS = (1, 2, 6)
"""What each node adds to each number when it trains; the mean is 3."""


class Seen:
    """Record what each node's functions get; add the node's step to each number."""

    def __init__(self):
        self.trained = defaultdict(list)
        self.evaluated = defaultdict(list)

    def train(self, msg, context):
        arrays = arrays_of(msg)
        node = node_of(context)
        self.trained[node].append(arrays)
        changed = {
            name: ~value if value.dtype == bool else (value + STEPS[node]).astype(value.dtype)
            for name, value in arrays.items()
        }
        return answer(msg, changed)

    def evaluate(self, msg, context):
        self.evaluated[node_of(context)].append(arrays_of(msg))
        return answer(msg, ok=1.0)


def observe(dispatch="packed", initial=MODEL, algorithm="dpsgd", **arguments):
    seen = Seen()
    result = federate(
        make_client(seen.train, seen.evaluate),
        NODES,
        ROUNDS,
        algorithm=algorithm,
        topology="complete",
        initial=initial,
        dispatch=dispatch,
        evaluate_every=1,
        **arguments,
    )
    return seen, result


@pytest.fixture(scope="module")
def mixed():
    """Run the model above with both dispatchers."""
    return {name: observe(name) for name in ("packed", "message")}


def test_clients_get_and_return_tensors_as_they_are(mixed, dispatch):
    seen, result = mixed[dispatch]
    models = [to_arrays(result.arrays), *(m for calls in seen.trained.values() for m in calls)]
    for model in models:
        assert list(model) == list(MODEL)
        for name, value in MODEL.items():
            assert model[name].shape == value.shape
            assert model[name].dtype == value.dtype
    assert result.run.train_failures == 0


def test_both_dispatchers_agree_on_all_tensors(mixed):
    (packed, first), (message, second) = mixed["packed"], mixed["message"]
    assert first.run.digest == second.run.digest
    for name in MODEL:
        assert first.arrays[name].data == second.arrays[name].data
        for node in range(NODES):
            for ours, theirs in zip(packed.trained[node], message.trained[node], strict=True):
                assert ours[name].tobytes() == theirs[name].tobytes()


def test_shared_tensors_are_averaged(mixed, dispatch):
    seen, result = mixed[dispatch]
    for node in range(NODES):
        for name in SHARED:
            # The mean of what was added is what all go on with.
            assert seen.trained[node][1][name] == pytest.approx(np.full(MODEL[name].shape, 3.0))
    for name in SHARED:
        assert to_arrays(result.arrays)[name] == pytest.approx(np.full(MODEL[name].shape, 6.0))


def test_private_tensors_stay_on_their_node(mixed, dispatch):
    seen, _ = mixed[dispatch]
    for node, step in enumerate(STEPS):
        second = seen.trained[node][1]
        assert (second["bn.running_mean"] == step).all()
        assert (second["bn.running_var"] == 1 + step).all()
        assert second["bn.num_batches_tracked"] == step
        assert (second["mask"] == [False, True]).all()
        last = seen.evaluated[node][-1]
        assert (last["bn.running_mean"] == 2 * step).all()
        assert last["bn.num_batches_tracked"] == 2 * step


def test_the_averaged_model_has_the_mean_statistics_and_the_counters_of_node_0(mixed, dispatch):
    _, result = mixed[dispatch]
    model = to_arrays(result.arrays)
    assert model["bn.running_mean"] == pytest.approx([6.0, 6.0])
    assert model["bn.running_var"] == pytest.approx([7.0, 7.0])
    assert model["bn.num_batches_tracked"] == 2 * STEPS[0]


def test_statistics_are_averaged_where_that_is_asked_for():
    seen, _ = observe(private_keys="none")
    for node, step in enumerate(STEPS):
        assert seen.trained[node][1]["bn.running_mean"] == pytest.approx([3.0, 3.0])
        # Integers cannot be averaged, whatever is asked for.
        assert seen.trained[node][1]["bn.num_batches_tracked"] == step


def test_other_tensors_are_private_where_that_is_asked_for():
    seen, result = observe(private_keys="half, bn.*")
    for node, step in enumerate(STEPS):
        assert (seen.trained[node][1]["half"] == step).all()
        assert seen.trained[node][1]["w"] == pytest.approx(3.0)
    assert to_arrays(result.arrays)["half"] == pytest.approx([6.0] * 3)


def test_a_frozen_tensor_reaches_every_node_and_may_not_change(dispatch):
    model = {"w": np.zeros(2, np.float32), "embedding": np.arange(3, dtype=np.float32)}

    def train(msg, context):
        arrays = arrays_of(msg)
        assert (arrays["embedding"] == [0, 1, 2]).all()
        arrays["w"] = arrays["w"] + 1
        if node_of(context) == 0 and msg.content["config"]["server-round"] == 1:
            arrays["embedding"] = arrays["embedding"] + 1
        return answer(msg, arrays)

    result = federate(
        make_client(train), initial=model, frozen_keys=["emb*"], rounds=2, dispatch=dispatch
    )
    assert result.run.train_failures == 1
    averaged = to_arrays(result.arrays)
    assert (averaged["embedding"] == [0, 1, 2]).all()
    assert averaged["w"] == pytest.approx([5 / 3] * 2)


def test_frozen_tensors_are_not_sent():
    def train(msg, context):
        return answer(msg, arrays_of(msg))

    big = np.zeros(10_000, np.float32)
    sent = [
        federate(
            make_client(train, None),
            initial={"w": np.zeros(10, np.float32), "big": big},
            algorithm="dpsgd",
            **keys,
        ).run.bytes.sent
        for keys in ({}, {"frozen_keys": "big"}, {"private_keys": "big"})
    ]
    assert sent[0] > big.nbytes > 10 * sent[1]
    assert sent[1] == sent[2]


@pytest.mark.parametrize(
    ("keys", "complaint"),
    [
        ({"private_keys": "hal"}, "private pattern 'hal' matches no tensor"),
        ({"frozen_keys": ["w", "other"]}, "frozen pattern 'other' matches no tensor"),
        ({"frozen_keys": "*"}, "no tensor to share"),
    ],
)
def test_patterns_that_leave_nothing_or_match_nothing_are_refused(keys, complaint):
    with pytest.raises(ConfigurationError, match=complaint):
        federate(make_client(), initial=MODEL, **keys)


def test_rounding_is_said(caplog):
    observe(initial={"w": np.zeros(1, np.float32), "double": np.zeros(1)}, algorithm="local")
    assert "float64 tensors are rounded to float32: double" in caplog.text
