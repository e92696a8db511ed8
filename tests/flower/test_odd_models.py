"""Models that a library meets sooner or later."""

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, Message, MetricRecord, RecordDict

from .toys import answer, arrays_of, federate, make_client, node_of, to_arrays


def move(msg, context):
    """Train what is called weight, by another amount on each node."""
    arrays = arrays_of(msg)
    step = np.float32(node_of(context) + 1)
    return answer(msg, {k: v + step if "weight" in k else v for k, v in arrays.items()})


def run(client, initial, dispatch="packed", **arguments):
    options = {"nodes": 3, "rounds": 2, "algorithm": "dpsgd", "topology": "complete", **arguments}
    return federate(client, initial=initial, dispatch=dispatch, **options)


@pytest.mark.parametrize(
    "algorithm", [{"algorithm": "dpsgd"}, {"algorithm": "divshare", "fragments": 1}]
)
def test_one_scalar(algorithm, dispatch):
    result = run(
        make_client(move, None), {"weight": np.float32(0)}, dispatch, rounds=4, **algorithm
    )
    (value,) = to_arrays(result.arrays).values()
    assert value.shape == ()
    assert value.dtype == np.float32
    # Nobody has got further than by the largest step in each round, nor less far than by the least.
    assert 4 <= value <= 12
    assert algorithm["algorithm"] != "dpsgd" or value == pytest.approx(8)


def test_frozen_layers_may_come_before_and_after_trained_ones():
    frozen, trained = np.full(5, 7, np.float32), np.zeros(3, np.float32)
    orders = (
        {"head": frozen, "weight": trained},
        {"weight": trained, "head": frozen},
    )
    before, after = (run(make_client(move, None), model, frozen_keys=["head"]) for model in orders)
    assert before.run.digest == after.run.digest
    for result, model in ((before, orders[0]), (after, orders[1])):
        arrays = to_arrays(result.arrays)
        assert list(arrays) == list(model)
        assert arrays["head"].tolist() == frozen.tolist()
        assert arrays["weight"].tolist() == [4, 4, 4]


@pytest.mark.slow
def test_an_embedding_of_50_megabytes(dispatch):
    embedding = np.zeros((250_000, 50), np.float32)

    def train(msg, context):
        array = msg.content["arrays"]["embedding"].numpy()
        array[node_of(context)] += 1
        content = {
            "arrays": ArrayRecord({"embedding": Array(array)}),
            "metrics": MetricRecord({"num-examples": 1}),
        }
        return Message(RecordDict(content), reply_to=msg)

    result = run(make_client(train, None), {"embedding": embedding}, dispatch, topology="ring")
    assert result.run.grid_array_bytes == 0
    averaged = to_arrays(result.arrays)["embedding"]
    assert averaged[:3] == pytest.approx(np.full((3, 50), 2 / 3), rel=1e-6)
    assert not averaged[3:].any()


# --- with torch -----------------------------------------------------------------------------------


def torch_client(make):
    """Train a torch module with one step of SGD on ones, as an app would."""
    import torch

    def train(msg, context):
        net = make()
        net.load_state_dict(msg.content["arrays"].to_torch_state_dict(), strict=True)
        net.train()
        parameters = [each for each in net.parameters() if each.requires_grad]
        inputs = torch.arange(8.0).reshape(2, 4) * (node_of(context) + 1)
        loss = (net(inputs) ** 2).mean()
        loss.backward()
        torch.optim.SGD(parameters, lr=0.01).step()
        content = {
            "arrays": ArrayRecord(net.state_dict()),
            "metrics": MetricRecord({"num-examples": 2}),
        }
        return Message(RecordDict(content), reply_to=msg)

    return make_client(train, None)


@pytest.fixture
def nn():
    torch = pytest.importorskip("torch")
    torch.manual_seed(0)
    return torch.nn


def initial_of(module):
    return {name: value.numpy() for name, value in module.state_dict().items()}


@pytest.mark.slow
def test_batch_normalization_keeps_its_statistics_by_default(nn, dispatch):
    def make():
        return nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))

    initial = initial_of(make())
    kept = run(torch_client(make), initial, dispatch)
    shared = run(torch_client(make), initial, dispatch, private_keys=[])
    statistics = initial["1.running_mean"].nbytes + initial["1.running_var"].nbytes
    messages = 3 * 2 * 2
    assert shared.run.bytes.sent - kept.run.bytes.sent == messages * statistics
    for result in (kept, shared):
        averaged = to_arrays(result.arrays)
        assert averaged["1.num_batches_tracked"] == 2, "a counter is never averaged"
        assert averaged["1.running_mean"].any()


@pytest.mark.slow
def test_layers_that_need_no_gradient_stay_to_the_bit(nn):
    def make():
        net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4))
        for layer in (net[0], net[2]):
            layer.requires_grad_(False)
        return net

    initial = initial_of(make())
    averaged = to_arrays(run(torch_client(make), initial, frozen_keys=["0.*", "2.*"]).arrays)
    for name, value in initial.items():
        assert np.array_equal(averaged[name], value) == (name[0] != "1"), name


@pytest.mark.slow
def test_tied_weights_stay_tied(nn, dispatch):
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.encode = nn.Linear(4, 4, bias=False)
            self.decode = nn.Linear(4, 4, bias=False)
            self.decode.weight = self.encode.weight

        def forward(self, inputs):
            return self.decode(self.encode(inputs).relu())

    initial = initial_of(Tied())
    averaged = to_arrays(run(torch_client(Tied), initial, dispatch).arrays)
    assert np.array_equal(averaged["encode.weight"], averaged["decode.weight"])
    assert not np.array_equal(averaged["encode.weight"], initial["encode.weight"])
