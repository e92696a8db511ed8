"""Every algorithm that sends models can send them shorter, and both ends know what was sent."""

from __future__ import annotations

import networkx as nx
import numpy as np
import pytest

from flwr_decentral import plugins
from flwr_decentral.core import WIRES, ConfigurationError, message_bytes
from flwr_decentral.ops import codecs
from flwr_decentral.testing import Cluster, Faults

EXACT = ("allreduce", "local")
"""One is exact by definition, the other sends nothing."""
NAMES = [name for name in plugins.SHELF if name not in EXACT]
SIZE, ROUNDS = 300, 6


def run(name, wire, faults=None):
    algorithm = plugins.make(name, wire=wire)
    graph = nx.path_graph(4) if algorithm.capabilities.needs_tree else nx.complete_graph(4)
    targets = np.random.default_rng(7).normal(size=(4, SIZE)).astype(np.float32)
    return Cluster(
        algorithm,
        topology=graph,
        initial=np.zeros(SIZE, np.float32),
        train=lambda node, round, x: x + np.float32(0.3) * (targets[node] - x),
        rounds=ROUNDS,
        faults=faults or Faults(),
    ).run()


@pytest.mark.parametrize("name", EXACT)
def test_what_sends_nothing_or_must_be_exact_has_no_wire(name):
    with pytest.raises(ConfigurationError, match="wire"):
        plugins.make(name, wire="int8")


@pytest.mark.parametrize("name", NAMES)
def test_an_unknown_wire_is_refused(name):
    with pytest.raises(ConfigurationError, match="no wire 'int4'.*int8"):
        plugins.load(name)(wire="int4")


@pytest.mark.parametrize("name", NAMES)
def test_payloads_travel_rounded_and_are_counted_as_long_as_they_are(name):
    full, short = run(name, "float32"), run(name, "int8")
    carried = [each.message for each in short.sent if each.message.payload is not None]
    assert carried
    for message in carried:
        length = len(message.payload)
        assert message.nbytes == message_bytes(length, "int8")
        assert message.nbytes < message_bytes(length)
        assert codecs.rounded(message.payload, "int8").tobytes() == message.payload.tobytes()
    assert short.finished == full.finished == [True] * 4
    # Every form leads to the same place, up to its own precision.
    for one, other in zip(full.machines, short.machines, strict=True):
        assert np.abs(one.model - other.model).max() < 0.1


@pytest.mark.slow
@pytest.mark.parametrize("wire", WIRES[1:])
@pytest.mark.parametrize("name", NAMES)
def test_each_wire_survives_a_storm_and_repeats(name, wire):
    storm = Faults(drop=0.2, duplicate=0.1, corrupt=0.05)
    first, second = run(name, wire, storm), run(name, wire, storm)
    assert first.transcript == second.transcript
    assert not first.stalled
    assert any(f"wire={wire}" in line for line in first.transcript)


@pytest.mark.parametrize("wire", WIRES)
@pytest.mark.parametrize("name", ["adpsgd", "a2cid2"])
def test_both_ends_of_an_exchange_move_by_opposites_of_what_was_rounded(name, wire):
    """So the sum of all models changes by training alone, whatever the form: up to float32."""
    algorithm = plugins.make(name, wire=wire)
    start = np.random.default_rng(3).normal(size=(2, SIZE)).astype(np.float32)
    cluster = Cluster(
        algorithm,
        topology=nx.path_graph(2),
        initial=np.zeros(SIZE, np.float32),
        train=lambda node, round, x: x + start[node] if round == 1 else x,
        rounds=8,
    ).run()
    exchanged = sum(each.message.kind == "answer" for each in cluster.sent)
    assert exchanged
    total = np.sum([machine.model.astype(np.float64) for machine in cluster.machines], axis=0)
    expected = start.astype(np.float64).sum(axis=0)
    if name == "a2cid2":
        momenta = [machine.momentum.astype(np.float64) for machine in cluster.machines]
        total, expected = total + np.sum(momenta, axis=0), 2 * expected
    np.testing.assert_allclose(total, expected, atol=2e-5)
