"""Every algorithm gives the same run with compiled arithmetic as with the reference."""

import networkx as nx
import numpy as np
import pytest

from flwr_decentral import plugins
from flwr_decentral.core import WIRES, ConfigurationError
from flwr_decentral.ops import Reference, choose
from flwr_decentral.testing import Cluster, Faults
from flwr_decentral.testing.transcripts import first_difference

SIZE, ROUNDS = 2_000, 5
MORE = {
    "a2cid2": [{"momentum": False}],
    "divshare": [{"partition": "layerwise"}, {"fragments": 7}],
    "relaysgd": [{"tree": "double-binary"}, {"variant": "grad"}, {"rate_scale": "kappa"}],
}
CASES = [
    ("divshare", {}),
    *(
        pytest.param(name, parameters, marks=pytest.mark.slow)
        for name in plugins.SHELF
        for parameters in [{}, *({"wire": wire} for wire in WIRES[1:]), *MORE.get(name, [])]
        if (name, parameters) != ("divshare", {})
    ),
]


def transcript(algorithm, ops):
    graph = nx.cycle_graph(5)
    if algorithm.capabilities.needs_tree:
        double = getattr(algorithm, "tree", "given") == "double-binary"
        graph = nx.complete_graph(5) if double else nx.balanced_tree(2, 2)
    rng = np.random.default_rng(11)
    targets = rng.normal(size=(len(graph), SIZE)).astype(np.float32)

    def train(node, round, x):
        return x + np.float32(0.3) * (targets[node] - x)

    cluster = Cluster(
        algorithm,
        topology=graph,
        initial={"a": np.zeros((30, 50), np.float32), "b": np.ones(SIZE - 1500, np.float32)},
        train=train,
        rounds=ROUNDS,
        faults=Faults(drop=0.1, duplicate=0.1, reorder=True),
        ops=ops,
    ).run()
    return cluster.transcript


@pytest.mark.parametrize(("name", "parameters"), CASES, ids=str)
def test_the_run_is_the_same(name, parameters):
    try:
        native = choose("native")
    except ConfigurationError as error:
        pytest.skip(str(error))
    try:
        algorithm = plugins.make(name, **parameters)
    except ConfigurationError as error:
        assert "wire" in parameters
        pytest.skip(str(error))
    expected = transcript(algorithm, Reference())
    assert len(expected) > 20
    assert first_difference(expected, transcript(algorithm, native)) is None


def test_other_arithmetic_is_told_apart():
    class Wrong(Reference):
        def combine(self, vectors, weights, out=None):
            return np.nextafter(super().combine(vectors, weights, out), np.float32(np.inf))

    algorithm = plugins.make("dpsgd")
    assert first_difference(transcript(algorithm, Reference()), transcript(algorithm, Wrong()))
