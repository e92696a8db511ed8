from typing import ClassVar

import networkx as nx

from flwr_decentral.testing.conformance import AlgorithmConformance
from flwr_decentral_adpsgd import ADPSGD
from flwr_decentral_adpsgd.divshare import ADPSGDDivShare


class TestADPSGD(AlgorithmConformance):
    algorithm = ADPSGD()


class TestBipartite(AlgorithmConformance):
    algorithm = ADPSGD(scheme="bipartite")
    topologies: ClassVar = {
        "ring": nx.cycle_graph(6),
        "star": nx.star_graph(4),
        "path": nx.path_graph(5),
    }


class TestDivShareBaseline(AlgorithmConformance):
    algorithm = ADPSGDDivShare(degree=4)
