"""The mod: what it does with a message of ours, and that it does nothing with any other."""

from __future__ import annotations

import random
import sys

import numpy as np
import pytest
from flwr.app import ConfigRecord, Context, Error, Message, MessageType, MetricRecord, RecordDict
from flwr.serverapp.strategy import FedAvg

import flwr_decentral.flower
from flwr_decentral.arena import Arena
from flwr_decentral.core import RuntimeFault
from flwr_decentral.core.layout import Layout
from flwr_decentral.flower import decentral_mod
from flwr_decentral.flower.calls import seed_everything
from flwr_decentral.flower.control import CONTROL, Job, load_facts

from . import toys
from .inprocess import run_in_process
from .toys import ZEROS, answer, arrays_of, federate, make_client, node_of, to_arrays, to_record


def context_of(node: int = 0) -> Context:
    config = {"partition-id": node, "num-partitions": 2}
    return Context(7, 100 + node, config, RecordDict(), {})


def refuse(msg, context):
    raise AssertionError("the user's function was called")


# --- messages of others ---------------------------------------------------------------------------


@pytest.mark.usefixtures("identity")
def test_a_message_of_another_strategy_is_passed_on_untouched():
    content = RecordDict({"config": ConfigRecord({"server-round": 1}), "arrays": to_record(ZEROS)})
    for msg in (
        Message(content, 1, MessageType.TRAIN),
        Message(RecordDict(), 1, MessageType.QUERY),
        Message(Error(code=1), reply_to=Message(RecordDict(), 1, MessageType.TRAIN)),
    ):
        context, reply, got = context_of(), object(), []

        def user(msg, context, got=got, reply=reply):
            got += [msg, context]
            return reply

        assert decentral_mod(msg, context, user) is reply
        assert got == [msg, context]
        assert list(content) == ["config", "arrays"]


@pytest.fixture(scope="module")
def fedavg():
    """Run plain FedAvg with a client; return its result as bytes and metrics."""

    def run(client):
        def main(grid):
            strategy = FedAvg(fraction_evaluate=1.0)
            return strategy.start(grid=grid, initial_arrays=to_record(ZEROS), num_rounds=2)

        # Two nodes, so that averages are exact: FedAvg adds up in the order of arrival.
        result = run_in_process(main, client, 2)
        return (
            {name: array.data for name, array in result.arrays.items()},
            {round: dict(record) for round, record in result.evaluate_metrics_clientapp.items()},
        )

    return run


@pytest.mark.slow
def test_fedavg_does_not_notice_the_mod(fedavg):
    without = fedavg(make_client(mods=[]))
    assert without[1][2]["mean"] == 1.125
    assert fedavg(make_client()) == without
    app = flwr_decentral.flower.ClientApp()
    app.train()(toys.train)
    app.evaluate()(toys.evaluate)
    assert fedavg(app) == without


# --- messages of ours -----------------------------------------------------------------------------


def test_the_client_app_with_the_mod_built_in_is_the_same():
    calls = []

    def counting_mod(msg, context, call_next):
        calls.append(msg.metadata.message_type)
        return call_next(msg, context)

    app = flwr_decentral.flower.ClientApp(mods=[counting_mod])
    app.train()(toys.train)
    app.evaluate()(toys.evaluate)
    result = federate(app, evaluate_every=3)
    assert result.run.digest == federate(make_client(), evaluate_every=3).run.digest
    # Inside ours: once for each call of a function, and not for each message.
    assert sorted(calls) == ["evaluate"] * 3 + ["train"] * 9


@pytest.mark.usefixtures("identity")
def test_a_hello_is_answered_without_the_user():
    control = ConfigRecord({"do": "hello", "protocol": 1, "config-key": "config"})
    msg = Message(RecordDict({CONTROL: control}), 101, MessageType.TRAIN)
    reply = decentral_mod(msg, context_of(1), refuse)
    facts = load_facts(str(reply.content[CONTROL]["facts"]))
    assert (facts["node"], facts["nodes"]) == (1, 2)
    assert facts["versions"]["numpy"] == np.__version__


@pytest.mark.usefixtures("identity")
def test_another_version_of_our_protocol_is_refused():
    control = ConfigRecord({"do": "hello", "protocol": 0, "config-key": "config"})
    msg = Message(RecordDict({CONTROL: control}), 101, MessageType.TRAIN)
    with pytest.raises(RuntimeFault, match="one version of flwr-decentral on both sides"):
        decentral_mod(msg, context_of(), refuse)


@pytest.fixture
def job():
    layout = Layout.of(ZEROS)
    arena = Arena.create(2, layout.size, 0, layout.pack())
    yield Job(
        arena=arena.ref,
        nodes=2,
        arrays_key="arrays",
        config_key="config",
        address="@nobody-listens-here",
        patience=1.0,
    )
    arena.close()


@pytest.mark.usefixtures("identity")
def test_a_host_that_comes_too_late_returns(job):
    content = RecordDict({CONTROL: job.control("host"), "config": ConfigRecord()})
    msg = Message(content, 101, MessageType.TRAIN)
    reply = decentral_mod(msg, context_of(), refuse)
    assert reply.content[CONTROL]["served"] == 0


def test_a_function_that_replies_with_an_error_has_failed(dispatch, caplog):
    def train(msg, context):
        if node_of(context) == 1:
            return Message(Error(code=1, reason="out of sorts"), reply_to=msg)
        return toys.train(msg, context)

    result = federate(make_client(train), rounds=2, dispatch=dispatch)
    assert result.run.train_failures == 2
    assert "the function replied with an error: out of sorts" in caplog.text


def test_arrays_that_the_user_returns_stay_on_the_node(dispatch):
    def train(msg, context):
        reply = toys.train(msg, context)
        reply.content["gradients"] = to_record(arrays_of(msg))
        return reply

    def evaluate(msg, context):
        reply = toys.evaluate(msg, context)
        reply.content["activations"] = to_record(arrays_of(msg))
        return reply

    result = federate(make_client(train, evaluate), dispatch=dispatch)
    assert result.run.grid_array_bytes == 0
    assert result.run.train_failures == 0
    assert to_arrays(result.arrays)["w"] == pytest.approx(1.75)


# --- seeds ----------------------------------------------------------------------------------------


def test_global_generators_are_seeded():
    draws = []
    for seed in (1, 2, 1):
        seed_everything(seed)
        draws.append((random.random(), np.random.random()))  # noqa: NPY002
    assert draws[0] == draws[2] != draws[1]


@pytest.mark.slow
def test_global_generators_are_seeded_for_each_task():
    def train(msg, context):
        noise = np.float32(random.random() + np.random.random())  # noqa: NPY002
        drawn.append(noise)
        return answer(msg, {"w": arrays_of(msg)["w"] + noise})

    def evaluate(msg, context):
        drawn.append(random.random())
        return toys.evaluate(msg, context)

    runs = []
    for changes in ({}, {"dispatch": "message"}, {"seed": 2}):
        drawn: list[float] = []
        result = federate(make_client(train, evaluate), workers=1, **changes)
        runs.append((result.run.digest, sorted(drawn)))
        assert len(set(drawn)) == len(drawn) == 18
    assert runs[0] == runs[1]
    assert runs[0][0] != runs[2][0]
    assert not set(runs[0][1]) & set(runs[2][1])


@pytest.mark.slow
def test_torch_is_seeded_as_it_seeds_itself_and_notes_nothing_down():
    torch = pytest.importorskip("torch")
    if torch.cuda.is_available():
        pytest.skip("with a device there is something to note down")
    noted = len(torch.cuda._queued_calls)
    seed_everything(5)
    drawn = torch.rand(3)
    assert len(torch.cuda._queued_calls) == noted
    torch.manual_seed(5)
    assert torch.equal(drawn, torch.rand(3))


FAKE_TORCH = """
import random

class Tensor: ...

class cuda:
    is_available = staticmethod(lambda: False)

class backends:
    mps = cuda

class Dice(random.Random):
    manual_seed = random.Random.seed

default_generator = Dice()
rand = default_generator.random
get_num_threads = lambda: 1
"""


def test_a_torch_that_is_imported_while_training_is_seeded(monkeypatch, tmp_path, dispatch):
    (tmp_path / "torch.py").write_text(FAKE_TORCH)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setitem(sys.modules, "torch", None)  # so that it is as it was afterwards
    del sys.modules["torch"]

    def train(msg, context):
        import torch

        times = context.state["memory"]["times"] if "memory" in context.state else 0
        context.state["memory"] = MetricRecord({"times": times + 1})
        calls.append(times + 1)
        return answer(msg, {"w": arrays_of(msg)["w"] + np.float32(torch.rand())})

    digests = []
    for first in (True, False):
        assert ("torch" not in sys.modules) == first
        calls: list[int] = []
        result = federate(make_client(train, None), nodes=2, workers=1, dispatch=dispatch)
        digests.append(result.run.digest)
        # The task that brought torch ran again, from the state that it had started from.
        assert sorted(calls) == [1] * first + [1, 1, 2, 2, 3, 3]
    assert digests[0] == digests[1]


def test_metrics_keep_their_type_on_the_way(dispatch):
    def train(msg, context):
        reply = toys.train(msg, context)
        reply.content["more"] = MetricRecord({"num-examples": 1, "many": [1, 2], "nan": np.nan})
        return reply

    def average(contents, key):
        seen.extend(dict(content["more"]) for content in contents)
        return MetricRecord()

    seen: list[dict] = []
    federate(make_client(train, None), rounds=1, dispatch=dispatch, train_metrics_aggr_fn=average)
    assert len(seen) == 3
    for record in seen:
        assert record["many"] == [1, 2]
        assert isinstance(record["num-examples"], int)
        assert np.isnan(record["nan"])
