"""The digits app, called as the ClientApp calls it, without the engine."""

from __future__ import annotations

import dataclasses
import importlib
import tomllib
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, Metadata, RecordDict

FOLDER = Path(__file__).parents[2] / "apps" / "digits"
NODES = 16

# Flower Datasets sorts in a way that pyarrow is about to drop.
pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:Specifying null_placement:FutureWarning"),
]


@pytest.fixture(scope="module")
def digits():
    # Imported here: a module that imports them costs even those who do not choose its tests.
    for module in ("torch", "flwr_datasets", "sklearn"):
        pytest.importorskip(module)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(FOLDER)
        yield SimpleNamespace(
            torch=importlib.import_module("torch"),
            task=importlib.import_module("digits_app.task"),
            client=importlib.import_module("digits_app.client_app"),
            server=importlib.import_module("digits_app.server_app"),
        )


@pytest.fixture
def run_config():
    return flatten(
        tomllib.loads((FOLDER / "pyproject.toml").read_text())["tool"]["flwr"]["app"]["config"]
    )


def flatten(table, prefix=""):
    flat = {}
    for key, value in table.items():
        if isinstance(value, dict):
            flat |= flatten(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = value
    return flat


class Node:
    """A node whose state lasts, as Flower keeps it."""

    def __init__(self, digits, run_config, partition_id=0, **changed):
        self.app = digits.client.app
        self.config = run_config | {key.replace("_", "-"): value for key, value in changed.items()}
        node_config = {"partition-id": partition_id, "num-partitions": NODES}
        self.context = Context(
            run_id=1, node_id=1, node_config=node_config, state=RecordDict(), run_config=self.config
        )

    def train(self, arrays):
        config = {key: self.config[key] for key in ("learning-rate", "momentum")}
        content = {"arrays": arrays, "config": ConfigRecord(config)}
        reply = self.call("train", RecordDict(content))
        return reply["arrays"], reply["metrics"]

    def evaluate(self, arrays):
        return self.call("evaluate", RecordDict({"arrays": arrays}))["metrics"]

    def call(self, kind, content):
        metadata = Metadata(
            run_id=1,
            message_id="1",
            src_node_id=1,
            dst_node_id=1,
            reply_to_message_id="",
            group_id="",
            created_at=0.0,
            ttl=60.0,
            message_type=kind,
        )
        message = Message(metadata=metadata, content=content)
        return self.app(message, self.context).content


@pytest.fixture
def arrays(digits):
    digits.torch.manual_seed(0)
    return ArrayRecord(digits.task.Net().state_dict())


def same(one, other):
    return all(np.array_equal(one[name].numpy(), other[name].numpy()) for name in one)


def partitions(digits, config, nodes=NODES):
    return [digits.task.load_data(node, nodes, config) for node in range(nodes)]


def rows(data):
    """The images as a multiset that can be compared."""
    return sorted(tuple(row) for images, _ in data for row in images.tolist())


def test_the_model_has_2410_parameters(digits):
    assert sum(parameter.numel() for parameter in digits.task.Net().parameters()) == 2410


def test_the_split_is_1437_and_360(digits, run_config):
    images, labels = digits.task.load_test_data()
    assert images.shape == (360, 64)
    assert (images.min(), images.max()) == (0, 1)
    assert set(labels.tolist()) == set(range(10))
    assert len(rows(partitions(digits, run_config | {"partitioner": "iid"}))) == 1437


def test_shards_are_equal_and_hold_few_labels(digits, run_config):
    data = partitions(digits, run_config)
    assert [len(labels) for _, labels in data] == [88] * NODES
    assert max(len(set(labels.tolist())) for _, labels in data) <= 4
    assert set(digits.torch.cat([labels for _, labels in data]).tolist()) == set(range(10))


def test_dirichlet_gives_every_image_to_one_node(digits, run_config):
    whole = partitions(digits, run_config | {"partitioner": "iid"})
    parts = partitions(digits, run_config | {"partitioner": "dirichlet"})
    assert rows(parts) == rows(whole)


def test_the_seed_decides_the_partition(digits, run_config):
    first = partitions(digits, run_config)
    digits.task._load_partition.cache_clear()
    digits.task._make_partitioner.cache_clear()
    again = partitions(digits, run_config)
    other = partitions(digits, run_config | {"seed": 2})
    assert all(digits.torch.equal(a[0], b[0]) for a, b in zip(first, again, strict=True))
    assert not all(digits.torch.equal(a[0], b[0]) for a, b in zip(first, other, strict=True))


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        (
            {"shards-per-node": 90},
            r"shards-per-node: 16 nodes with 90 shards each need 1440 images",
        ),
        ({"shards-per-node": 0}, r"shards-per-node"),
        ({"partitioner": "shard"}, r"partitioner: expected shards, dirichlet or iid, got 'shard'"),
    ],
)
def test_what_cannot_be_divided_is_refused(digits, run_config, changed, words):
    with pytest.raises(ValueError, match=words):
        digits.task.load_data(0, NODES, run_config | changed)


def test_training_is_repeatable(digits, run_config, arrays):
    results = []
    for seed in (7, 7, 8):
        digits.torch.manual_seed(seed)
        results.append(Node(digits, run_config).train(arrays))
    (one, metrics), (two, same_metrics), (three, _) = results
    assert same(one, two)
    assert dict(metrics) == dict(same_metrics)
    assert not same(one, three)


def test_training_reports_examples_and_loss(digits, run_config, arrays):
    trained, metrics = Node(digits, run_config).train(arrays)
    assert set(metrics) == {"num-examples", "train-loss"}
    assert metrics["num-examples"] == 88
    assert 0 < metrics["train-loss"] < 3
    assert list(trained) == list(arrays)


def test_momentum_lasts_from_round_to_round(digits, run_config, arrays, monkeypatch):
    """Two rounds of four steps are one round of eight: nothing is lost between them."""
    # Making a model draws from the global generator, too, so the batches get one of their own.
    draw, generator = digits.torch.randint, digits.torch.Generator()
    monkeypatch.setattr(digits.torch, "randint", lambda *args: draw(*args, generator=generator))

    generator.manual_seed(7)
    whole, _ = Node(digits, run_config, local_steps=8).train(arrays)

    generator.manual_seed(7)
    node = Node(digits, run_config, local_steps=4)
    half, _ = node.train(arrays)
    assert list(node.context.state["momentum"]) == list(arrays)
    halves, _ = node.train(half)
    assert same(halves, whole)

    generator.manual_seed(7)
    half, _ = Node(digits, run_config, local_steps=4).train(arrays)
    forgetful, _ = Node(digits, run_config, local_steps=4).train(half)
    assert not same(forgetful, whole)


def test_no_momentum_leaves_no_state(digits, run_config, arrays):
    node = Node(digits, run_config, momentum=0.0)
    node.train(arrays)
    assert not node.context.state


def test_a_node_without_data_returns_its_model(digits, run_config, arrays):
    scarce = run_config | {"partitioner": "dirichlet", "alpha": 0.001}
    sizes = [len(labels) for _, labels in partitions(digits, scarce)]
    node = Node(digits, scarce, partition_id=sizes.index(0))
    returned, metrics = node.train(arrays)
    assert same(returned, arrays)
    assert dict(metrics) == {"num-examples": 0, "train-loss": 0.0}
    assert not node.context.state


def test_evaluation_is_on_all_digits(digits, run_config, arrays):
    node = Node(digits, run_config, local_steps=100)
    metrics = node.evaluate(node.train(arrays)[0])
    assert set(metrics) == {"num-examples", "loss", "accuracy"}
    assert metrics["num-examples"] == 360
    # It knows its own two digits, and not one of the other eight.
    assert 0.1 < metrics["accuracy"] < 0.35


def test_the_server_evaluates_as_the_nodes_do(digits, run_config, arrays):
    on_node = Node(digits, run_config).evaluate(arrays)
    on_server = digits.server.evaluate_averaged_model(0, arrays)
    assert dict(on_server) == {key: on_node[key] for key in ("loss", "accuracy")}


def test_whatever_can_be_set_can_be_overridden(run_config):
    """Flower refuses to override a key that the app does not list."""
    from flwr_decentral import plugins
    from flwr_decentral.flower.settings import Settings, resolve
    from flwr_decentral.sim.scenario import Compute, Network

    named = {field.name.replace("_", "-") for field in dataclasses.fields(Settings)}
    assert named - set(run_config) == {"setup-timeout"}
    network = {f"network.{field.name}" for field in dataclasses.fields(Network)}
    assert network <= set(run_config)
    compute = {f"compute.{field.name}" for field in dataclasses.fields(Compute)}
    assert compute - set(run_config) == {"compute.factors", "compute.trace"}  # one for each node
    for name in plugins.SHELF:
        parameters = resolve(name, run_config, {}).algorithm.parameters
        keys = {f"{name}.{key.replace('_', '-')}" for key in parameters}
        assert keys - set(run_config) <= {"divshare.granularity", "divshare.partition-seed"}
