"""Where the contract has an operation for a whole step, algorithms make one call of it."""

from collections import Counter

import networkx as nx
import numpy as np

from flwr_decentral.core import Message, Received, Started, TrainDone
from flwr_decentral.ops import Reference
from flwr_decentral.testing import make_site
from flwr_decentral_a2cid2 import A2CiD2
from flwr_decentral_relaysgd import RelaySGD

SIZE = 8


class Counting:
    """The reference, and how often each operation is asked for."""

    def __init__(self):
        self.calls = Counter()

    def __getattr__(self, name):
        operation = getattr(Reference(), name)

        def count(*arguments, **options):
            self.calls[name] += 1
            return operation(*arguments, **options)

        return count if callable(operation) else operation


def start(algorithm, graph):
    ops = Counting()
    site = make_site(topology=nx.freeze(graph), initial=np.zeros(SIZE, np.float32), ops=ops)
    machine = algorithm.machine(site)
    machine.step(Started(at=0, up=site.neighbors))
    return machine, ops.calls


def trained(machine, round, at):
    after = np.full(SIZE, round, np.float32)
    return machine.step(TrainDone(at=at, round=round, before=machine.model, after=after))


def test_a_node_of_a_tree_makes_all_its_sums_at_once():
    machine, calls = start(RelaySGD(tree="given"), nx.star_graph(3))
    trained(machine, 1, at=1)
    for peer in (1, 2, 3):
        message = Message(
            kind="sum",
            step=1,
            payload=np.full(SIZE, peer, np.float32),
            header={"tree": 0, "count": 1, "members": 1},
        )
        machine.step(Received(at=2, source=peer, message=message))
    calls.clear()
    sent = trained(machine, 2, at=3)
    assert calls["sums_without"] == 1
    assert calls["combine"] == 0
    sums = {each.to: float(each.message.payload[0]) for each in sent if hasattr(each, "message")}
    assert sums == {1: 2 + 2 + 3, 2: 2 + 1 + 3, 3: 2 + 1 + 2}


def test_training_and_the_flow_of_a_momentum_are_one_operation():
    machine, calls = start(A2CiD2(), nx.cycle_graph(4))
    trained(machine, 1, at=1000)
    trained(machine, 2, at=2000)
    assert calls["mix_update"] == 2
    assert calls["mix"] == calls["update"] == 0


def test_an_answer_moves_both_vectors_in_one_operation():
    machine, calls = start(A2CiD2(), nx.cycle_graph(4))
    trained(machine, 1, at=1000)
    number = {"exchange": 1}
    machine.step(Received(at=1500, source=1, message=Message(kind="invite", step=1, header=number)))
    calls.clear()
    answer = Message(
        kind="answer",
        step=1,
        payload=np.ones(SIZE, np.float32),
        header={**number, "attempt": 1},
    )
    machine.step(Received(at=1700, source=1, message=answer))
    assert calls["mix_pairwise"] == 1
    assert calls["mix"] == calls["pairwise"] == 0
