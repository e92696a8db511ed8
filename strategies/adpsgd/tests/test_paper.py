"""The invariants of AD-PSGD: no update is lost, whatever comes between, and none counts twice."""

import networkx as nx
import numpy as np
import pytest

from flwr_decentral.core import (
    SECOND,
    Layout,
    Received,
    Seeds,
    Send,
    Site,
    Started,
    TrainDone,
)
from flwr_decentral.ops import Reference
from flwr_decentral.testing import Cluster, Faults, Outage, Split
from flwr_decentral_adpsgd import ADPSGD, ADPSGDMachine

RING = nx.freeze(nx.cycle_graph(8))


class Float64(Reference):
    """The reference arithmetic without its rounding to float32."""

    def pairwise(self, x, mine, theirs, weight):
        return x + weight * (theirs - mine)


def machines(graph, starts, kind=ADPSGDMachine):
    """Make machines that have ended their first round with given models, in float64."""
    layout = Layout.of({"x": np.zeros(starts.shape[1], np.float32)})
    result = []
    for node in graph:
        site = Site(
            node=node,
            topology=graph,
            layout=layout,
            initial=np.zeros(starts.shape[1]),
            seeds=Seeds(0).of(node),
            ops=Float64(),
        )
        machine = kind(site, ADPSGD())
        machine.step(Started(at=0, up=site.neighbors))
        after = starts[node].copy()
        machine.step(TrainDone(at=SECOND, round=1, before=machine.model, after=after))
        result.append(machine)
    return result


def invite(nodes, node, peer):
    commands = nodes[node].pairing.begin({peer}, at=SECOND, step=2)
    return [(node, peer, c.message) for c in commands if isinstance(c, Send)]


def deliver(nodes, mail, place=0):
    source, node, message = mail.pop(place)
    commands = nodes[node].step(Received(at=SECOND, source=source, message=message))
    mail += [(node, c.to, c.message) for c in commands if isinstance(c, Send)]


def learn(nodes, node, update, round=2):
    machine = nodes[node]
    before = np.zeros_like(update)
    event = TrainDone(at=SECOND, round=round, before=before, after=before + update)
    machine.step(event)


def models(nodes):
    return np.stack([machine.model for machine in nodes])


def normal(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape)


def test_d1_d2_an_exchange_keeps_the_mean_and_never_spreads_the_models():
    starts, dice = normal(8, 4), np.random.default_rng(1)
    nodes, mail = machines(RING, starts), []
    spread = np.square(starts - starts.mean(axis=0)).sum()
    for _ in range(500):
        node = int(dice.integers(8))
        peer = (node + int(dice.choice([-1, 1]))) % 8
        mail += invite(nodes, node, peer)
        while mail:
            deliver(nodes, mail)
        # Where nothing comes between, both are the average.
        np.testing.assert_allclose(nodes[node].model, nodes[peer].model, rtol=0, atol=1e-15)
        now = models(nodes)
        np.testing.assert_allclose(now.mean(axis=0), starts.mean(axis=0), rtol=0, atol=1e-14)
        after = np.square(now - now.mean(axis=0)).sum()
        assert after <= spread * (1 + 1e-12)
        spread = after
    assert spread < 1e-8


class Overwriting(ADPSGDMachine):
    """Write the average of the own model of now and the other one that was sent over the model."""

    def average(self, exchange, at):
        self.model = (self.model + exchange.theirs) / 2


@pytest.mark.parametrize(
    ("kind", "kept"), [(ADPSGDMachine, 1.0), (Overwriting, 0.5)], ids=["difference", "overwriting"]
)
def test_e8_how_much_of_a_concurrent_update_is_kept(kind, kept):
    """Every update comes while its node waits for an answer."""
    nodes, dice, total = machines(RING, np.zeros((8, 4)), kind), np.random.default_rng(2), 0.0
    mail = []
    for _ in range(200):
        node = int(dice.integers(8))
        peer = (node + 1) % 8
        mail += invite(nodes, node, peer)
        deliver(nodes, mail)
        update = dice.normal(size=4)
        learn(nodes, peer, update)
        while mail:
            deliver(nodes, mail)
        total = total + update
    np.testing.assert_allclose(models(nodes).sum(axis=0), kept * total, rtol=1e-10)


def test_d3_any_interleaving_keeps_every_update():
    starts, dice = normal(8, 4), np.random.default_rng(3)
    nodes, mail, between = machines(RING, starts), [], 0
    total = starts.sum(axis=0)
    for number in range(3000):
        action, node = dice.integers(4), int(dice.integers(8))
        if action == 0:
            update = dice.normal(size=4)
            total = total + update
            between += nodes[node].pairing.offer is not None
            learn(nodes, node, update, number + 2)
        elif action == 1:
            mail += invite(nodes, node, (node + int(dice.choice([-1, 1]))) % 8)
        elif mail:
            deliver(nodes, mail, int(dice.integers(len(mail))))
    while mail:
        deliver(nodes, mail)
    assert between > 100
    np.testing.assert_allclose(models(nodes).sum(axis=0), total, rtol=0, atol=1e-11)


def test_d4_a_repeated_message_counts_once():
    starts = normal(8, 4)
    nodes, mail = machines(RING, starts), []
    mail += invite(nodes, 0, 1)
    while mail:
        copy = mail[0]
        deliver(nodes, mail)
        mail.append(copy)
        sent = len(mail)
        deliver(nodes, mail, len(mail) - 1)
        assert len(mail) == sent - 1
    middle = (starts[0] + starts[1]) / 2
    np.testing.assert_allclose(models(nodes)[:2], [middle, middle], rtol=0, atol=1e-15)


def test_the_gradient_is_that_of_the_old_model_and_is_applied_to_the_averaged_one():
    nodes, mail = machines(RING, normal(8, 4)), []
    before, other = nodes[1].model, nodes[0].model
    mail += invite(nodes, 0, 1)
    while mail:
        deliver(nodes, mail)
    after = before - 0.1 * before
    nodes[1].step(TrainDone(at=SECOND, round=2, before=before, after=after))
    np.testing.assert_allclose(nodes[1].model, (before + other) / 2 - 0.1 * before, atol=1e-15)


def update(node, number):
    return np.random.default_rng([node, number]).normal(size=6).astype(np.float32)


def still_to_come(cluster):
    """Add up what hosts will have to add when they hear the answers that are kept for them."""
    missing = np.zeros(6)
    for host, machine in enumerate(cluster.machines):
        open_offers = dict(machine.pairing.doubts)
        if machine.pairing.offer is not None:
            open_offers[machine.pairing.peer] = machine.pairing.offer
        for inviter, offer in open_offers.items():
            answer = cluster.machines[inviter].pairing.answers.get(host)
            if answer is not None and answer.exchange == offer.exchange:
                missing += (answer.vector.astype(np.float64) - offer.vector) / 2
    return missing


HEALED = {
    "calm": Faults(),
    "delay": Faults(delay=(SECOND // 4, SECOND)),
    "duplicates": Faults(duplicate=0.5, echo=2 * SECOND, reorder=True),
    "partition": Faults(partitions=(Split(3 * SECOND, 9 * SECOND, frozenset({0, 1, 2})),)),
    "outages": Faults(
        outages=(Outage(1, 3 * SECOND, 7 * SECOND), Outage(4, 5 * SECOND, 6 * SECOND)),
        delay=(0, SECOND // 2),
    ),
    "slow": Faults(slow={2: 4.0}, uplink=SECOND // 8),
    "failing": Faults(fail_train={1: {2, 5}}),
}
LOSSY = {
    "loss": Faults(drop=0.1),
    "loss-and-delay": Faults(drop=0.3, delay=(0, SECOND)),
    "corruption": Faults(corrupt=0.2),
}


@pytest.mark.parametrize("name", [*HEALED, *LOSSY])
@pytest.mark.parametrize("scheme", ["free", "bipartite"])
def test_no_update_is_lost_under_faults(name, scheme):
    rounds, faults = 25, (HEALED | LOSSY)[name]
    cluster = Cluster(
        ADPSGD(scheme=scheme),
        topology=RING,
        initial=np.zeros(6, np.float32),
        train=lambda node, number, model: model + update(node, number),
        rounds=rounds,
        faults=faults,
    ).run()
    assert cluster.trained == [rounds] * 8
    failed = {(node, number) for node, numbers in faults.fail_train.items() for number in numbers}
    done = [(i, r) for i in range(8) for r in range(1, rounds + 1) if (i, r) not in failed]
    total = np.sum([update(*each) for each in done], axis=0, dtype=np.float64)
    found = cluster.models.sum(axis=0, dtype=np.float64) + still_to_come(cluster)
    # Some 8 * 25 * 6 roundings of numbers below 16, at half an ulp.
    np.testing.assert_allclose(found, total, rtol=0, atol=1200 * 2.0**-21 / 8)
    assert cluster.counters["staleness"].count > 20
    if name in HEALED:
        assert not still_to_come(cluster).any()
