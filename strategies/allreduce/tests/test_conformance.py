from dataclasses import replace
from types import MappingProxyType

import networkx as nx
import pytest

from flwr_decentral.testing.conformance import AlgorithmConformance
from flwr_decentral_allreduce import AllReduce


class Kit(AlgorithmConformance):
    single = AllReduce()
    topologies = MappingProxyType(
        {
            "ring": nx.cycle_graph(4),
            "complete": nx.complete_graph(4),
            "path": nx.path_graph(4),
            "star": nx.star_graph(3),
        }
    )

    def storm(self):
        # Overtaking messages are asked for again and again, which takes time to simulate: once,
        # among the faults to survive.
        return replace(super().storm(), reorder=False, delay=(0, 0), drop=0.05)


class TestAllReduce(Kit):
    algorithm = AllReduce(chunks=2, patience=60.0)


@pytest.mark.slow
class TestChunks(Kit):
    algorithm = AllReduce(patience=60.0)
    variants = (AllReduce(chunks=3, retry=0.1, patience=7.3),)
