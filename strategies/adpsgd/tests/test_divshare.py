"""The variant that the DivShare paper compares with: pings, pongs, and a plain average later."""

import networkx as nx
import numpy as np
import pytest

from flwr_decentral.core import (
    MILLISECOND,
    SECOND,
    ConfigurationError,
    DropQueued,
    Layout,
    Message,
    PeerUp,
    Received,
    Report,
    Send,
    Started,
    Stopped,
    Train,
    TrainDone,
)
from flwr_decentral.testing import Cluster, Faults, make_site
from flwr_decentral_adpsgd.divshare import ADPSGDDivShare


def of(kind, commands):
    return [command for command in commands if isinstance(command, kind)]


def vector(*values):
    return np.array(values, np.float32)


def node(n=5, up=None, **parameters):
    site = make_site(topology=nx.complete_graph(n), initial=vector(0, 0))
    machine = ADPSGDDivShare(**parameters).machine(site)
    machine.step(Started(at=0, up=site.neighbors if up is None else up))
    return machine


def train(machine, *after, number=1):
    event = TrainDone(at=0, round=number, before=machine.model, after=vector(*after))
    return machine.step(event)


def give(machine, source, *values, kind="ping", step=1, number=1):
    message = Message(kind=kind, step=step, payload=vector(*values), header={"number": number})
    return machine.step(Received(at=0, source=source, message=message))


@pytest.mark.parametrize(("degree", "sent"), [(2, 1), (6, 3), (7, 3)])
def test_half_the_degree_is_sent_to_neighbors_drawn_with_replacement(degree, sent):
    machine, twice = node(degree=degree), 0
    for number in range(1, 60):
        sends = of(Send, train(machine, number, 0, number=number))
        assert len(sends) == sent
        assert {send.message.kind for send in sends} == {"ping"}
        twice += len({send.to for send in sends}) < sent
        assert 0 not in {send.to for send in sends}
    assert bool(twice) == (sent > 1)


def test_a_ping_is_answered_by_the_model_of_the_last_training():
    machine = node()
    (pong,) = of(Send, give(machine, 3, 8, 8))
    assert (pong.to, pong.message.kind, pong.message.step) == (3, "pong", 0)
    assert pong.message.payload.tolist() == [0, 0]
    train(machine, 2, 4)
    assert machine.model.tolist() == [5, 6]
    (pong,) = of(Send, give(machine, 3, 8, 8, step=2, number=2))
    assert pong.message.payload.tolist() == [2, 4]
    assert pong.message.step == 1


def test_a_pong_is_not_answered_and_a_repeated_ping_not_again():
    machine = node()
    assert not of(Send, give(machine, 3, 8, 8, kind="pong"))
    assert of(Send, give(machine, 3, 8, 8, number=4, step=2))
    assert not of(Send, give(machine, 3, 8, 8, number=4, step=2))
    machine.step(PeerUp(at=0, peer=3))
    assert of(Send, give(machine, 3, 8, 8, number=1, step=1))


def test_the_newest_of_each_sender_is_averaged_once():
    machine = node()
    give(machine, 1, 4, 0, step=2)
    give(machine, 1, 100, 100, step=1, number=2)
    give(machine, 2, 2, 3, kind="pong", step=5)
    commands = train(machine, 0, 0, number=3)
    (again,), (report,) = of(Train, commands), of(Report, commands)
    np.testing.assert_allclose(again.model, [2, 1], rtol=1e-6)
    assert report == Report(name="staleness", count=2, total=1.0 - 2.0)
    assert all(send.message.payload.tolist() == [0, 0] for send in of(Send, commands))
    commands = train(machine, 7, 7, number=4)
    assert of(Train, commands)[0].model.tolist() == [7, 7]


def test_nothing_is_flushed_unless_asked_for():
    assert not of(DropQueued, train(node(), 1, 1))
    assert train(node(flush=True), 1, 1)[0] == DropQueued()


def test_without_neighbors_it_only_trains():
    commands = train(node(up=()), 1, 1)
    assert commands == [Train(round=2, model=commands[0].model)]


@pytest.mark.parametrize(
    "message",
    [
        Message(kind="model", step=1, payload=vector(1, 1), header={"number": 1}),
        Message(kind="ping", step=1, header={"number": 1}),
        Message(kind="ping", step=1, payload=vector(1, 1)),
        Message(kind="pong", step=1, payload=vector(1, 1, 1), header={"number": 1}),
    ],
)
def test_what_makes_no_sense_is_counted(message):
    machine = node()
    (report,) = machine.step(Received(at=0, source=1, message=message))
    assert report == Report(name="bad-message", nbytes=message.nbytes)
    assert not len(machine.inbox)


def test_what_comes_too_late_is_counted():
    machine = node()
    give(machine, 1, 4, 0)
    (report,) = machine.step(Stopped(at=0, reason=""))
    assert report == Report(name="unused", nbytes=64 + 8)


def academic(n, initial, train, rounds, pings):
    """Follow rounds on plain arrays, given who pinged whom: all of it arrives within the round."""
    x, latest, inbox = [initial] * n, {}, [{} for _ in range(n)]
    for t in range(1, rounds + 1):
        latest = {i: train(i, t, x[i]) for i in range(n)}
        for i in range(n):
            models = [latest[i], *(inbox[i][j] for j in sorted(inbox[i]))]
            weight = np.float32(1 / len(models))
            total = weight * models[0]
            for model in models[1:]:
                total = total + weight * model
            x[i] = total if len(models) > 1 else latest[i]
        inbox = [{} for _ in range(n)]
        for i, j in pings[t]:
            inbox[j][i] = latest[i]
            inbox[i][j] = latest[j]
    return np.stack(x)


@pytest.mark.parametrize(("n", "degree"), [(6, 4), (3, 6), (2, 2)])
def test_a_synchronous_run_equals_the_academic_version_to_the_bit(n, degree):
    initial = np.random.default_rng(5).normal(size=19).astype(np.float32)
    targets = np.random.default_rng(6).normal(size=(n, 19)).astype(np.float32)

    def train(node, number, model):
        return model - np.float32(0.3 / number) * (model - targets[node])

    cluster = Cluster(
        ADPSGDDivShare(degree=degree),
        topology=nx.complete_graph(n),
        initial=initial,
        train=train,
        rounds=10,
        faults=Faults(uplink=MILLISECOND),
    ).run()
    pings = {t: [] for t in range(1, 11)}
    for at, source, to, message in cluster.sent:
        assert at // SECOND == message.step
        if message.kind == "ping":
            pings[message.step].append((source, to))
    np.testing.assert_array_equal(cluster.models, academic(n, initial, train, 10, pings))


def test_the_mean_of_all_models_is_not_kept():
    """Which is what sets it apart from the AD-PSGD of the paper of that name."""
    shifts = []
    for seed in range(5):
        cluster = Cluster(
            ADPSGDDivShare(degree=2),
            topology=nx.complete_graph(6),
            initial=np.zeros(1, np.float32),
            train=lambda node, number, model: model + (np.float32(node) if number == 1 else 0),
            rounds=30,
            faults=Faults(uplink=MILLISECOND),
            seed=seed,
        ).run()
        assert cluster.models.max() - cluster.models.min() < 0.1
        shifts.append(cluster.models.mean() - 2.5)
    assert np.std(shifts) > 0.05


def test_parameters_are_checked():
    with pytest.raises(ConfigurationError, match="at least 2"):
        ADPSGDDivShare(degree=1)
    layout = Layout.of({"x": np.zeros(1, np.float32)})
    (warning,) = ADPSGDDivShare(degree=5).check(nx.complete_graph(3), layout)
    assert "odd" in warning
    assert not ADPSGDDivShare().check(nx.complete_graph(3), layout)
