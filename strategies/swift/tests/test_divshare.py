"""The variant that the DivShare paper compares with: DivShare with one fragment, and no flush."""

from collections import Counter, defaultdict

import networkx as nx
import numpy as np
import pytest

from flwr_decentral.core import (
    MILLISECOND,
    SECOND,
    ConfigurationError,
    DropQueued,
    Message,
    PeerDown,
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
from flwr_decentral_swift.divshare import SWIFTDivShare


def vector(*values):
    return np.array(values, np.float32)


def of(kind, commands):
    return [command for command in commands if isinstance(command, kind)]


def node(n=5, up=None, **parameters):
    site = make_site(topology=nx.complete_graph(n), initial=vector(0, 0))
    machine = SWIFTDivShare(**({"degree": 2} | parameters)).machine(site)
    machine.step(Started(at=0, up=site.neighbors if up is None else up))
    return machine


def train(machine, *after, number=1):
    event = TrainDone(at=0, round=number, before=machine.model, after=vector(*after))
    return machine.step(event)


def give(machine, source, *values, step=1, kind="model"):
    message = Message(kind=kind, step=step, payload=vector(*values))
    return machine.step(Received(at=0, source=source, message=message))


def test_the_trained_model_is_sent_before_it_is_averaged():
    machine = node()
    give(machine, 1, 8, 8)
    commands = train(machine, 2, 4)
    assert [type(each) for each in commands] == [Send, Send, Report, Train]
    assert {tuple(send.message.payload) for send in of(Send, commands)} == {(2, 4)}
    assert machine.model.tolist() == [5, 6]
    assert of(Train, commands)[0].model is machine.model


def test_the_newest_of_each_sender_is_averaged_once_and_forgotten():
    machine = node()
    give(machine, 1, 4, 0, step=2)
    (report,) = give(machine, 1, 100, 100, step=1)
    assert report == Report(name="superseded", nbytes=64 + 8)
    give(machine, 2, 2, 3, step=5)
    (report,) = of(Report, train(machine, 0, 0, number=3))
    np.testing.assert_allclose(machine.model, [2, 1], rtol=1e-6)
    assert report == Report(name="staleness", count=2, total=-1.0)
    train(machine, 7, 7, number=4)
    assert machine.model.tolist() == [7, 7]


def test_receivers_are_drawn_anew_each_round_without_repetition():
    machine, sets = node(n=5), Counter()
    for number in range(1, 1201):
        receivers = [send.to for send in of(Send, train(machine, 0, 0, number=number))]
        assert len(set(receivers)) == 2
        sets[frozenset(receivers)] += 1
    assert len(sets) == 6
    # Chi-square with 5 degrees of freedom exceeds 25.7 once in 10,000 times.
    assert sum((count - 200) ** 2 / 200 for count in sets.values()) < 25.7


def test_nothing_is_dropped_unless_asked_for():
    assert not of(DropQueued, train(node(), 1, 1))
    assert train(node(flush=True), 1, 1)[0] == DropQueued()


def test_who_is_gone_gets_nothing_but_what_it_sent_counts():
    machine = node(n=3)
    give(machine, 1, 4, 4)
    assert machine.step(PeerDown(at=0, peer=1)) == [DropQueued(to=1)]
    assert [send.to for send in of(Send, train(machine, 0, 0))] == [2]
    assert machine.model.tolist() == [2, 2]
    machine.step(PeerUp(at=0, peer=1))
    assert not give(machine, 1, 4, 4, step=1)


def test_what_does_not_fit_or_comes_too_late_is_counted():
    machine = node()
    assert give(machine, 1, 1, 1, 1)[0].name == "bad-model"
    assert give(machine, 1, 1, 1, kind="ping")[0].name == "bad-model"
    give(machine, 1, 4, 0)
    assert machine.step(Stopped(at=0, reason="")) == [Report(name="unused", nbytes=64 + 8)]


def test_bad_degrees():
    with pytest.raises(ConfigurationError):
        SWIFTDivShare(degree=0)
    layout = make_site(topology=nx.path_graph(2), initial=vector(0)).layout
    (warning,) = SWIFTDivShare().check(nx.complete_graph(4), layout)
    assert "degree 6 is more than some node has neighbors, 3:" in warning
    assert not SWIFTDivShare(degree=3).check(nx.complete_graph(4), layout)


def academic(n, initial, train, rounds, sent):
    """Let round t use what was sent in round t - 1: training takes longer than sending."""
    x, mail = [initial.copy() for _ in range(n)], {}
    for t in range(1, rounds + 1):
        y = [train(i, t, x[i]) for i in range(n)]
        for i in range(n):
            terms = [y[i], *(mail[j] for j in sorted(sent[t - 1, i]))]
            weight = np.float32(1 / len(terms))
            x[i] = terms[0] * weight if len(terms) > 1 else y[i]
            for term in terms[1:]:
                x[i] = x[i] + term * weight
        mail = dict(enumerate(y))
    return np.stack(x)


@pytest.mark.parametrize(("n", "degree"), [(6, 2), (4, 3), (5, 6)])
def test_synchronous_run_equals_the_academic_version_to_the_bit(n, degree):
    initial = np.random.default_rng(5).normal(size=17).astype(np.float32)
    targets = np.random.default_rng(6).normal(size=(n, 17)).astype(np.float32)

    def pull(node, number, model):
        return model - np.float32(0.3 / number) * (model - targets[node])

    cluster = Cluster(
        SWIFTDivShare(degree=degree),
        topology=nx.complete_graph(n),
        initial=initial,
        train=pull,
        rounds=8,
        faults=Faults(uplink=MILLISECOND),
    ).run()
    sent = defaultdict(list)
    for at, src, dst, message in cluster.sent:
        assert at // SECOND == message.step
        sent[message.step, dst].append(src)
    np.testing.assert_array_equal(cluster.models, academic(n, initial, pull, 8, sent))


def test_it_is_divshare_with_one_fragment():
    divshare = pytest.importorskip("flwr_decentral_divshare")
    n = 6
    targets = np.random.default_rng(6).normal(size=(n, 9)).astype(np.float32)
    # With all others as receivers nothing depends on the draws.
    runs = [
        Cluster(
            algorithm,
            topology=nx.complete_graph(n),
            initial=np.zeros(9, np.float32),
            train=lambda node, _round, x: x + np.float32(0.2) * (targets[node] - x),
            rounds=10,
            faults=Faults(slow={1: 2.5}, uplink=MILLISECOND),
        ).run()
        for algorithm in (
            SWIFTDivShare(degree=5),
            divshare.DivShare(fragments=1, degree=5, flush=False),
        )
    ]
    np.testing.assert_allclose(runs[0].models, runs[1].models, rtol=1e-5, atol=1e-6)
    assert len(runs[0].sent) == len(runs[1].sent)
