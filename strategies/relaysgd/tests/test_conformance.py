from types import MappingProxyType

import networkx as nx
import pytest

from flwr_decentral.core.topology import build
from flwr_decentral.testing.conformance import AlgorithmConformance
from flwr_decentral_relaysgd import RelaySGD


class TestRelaySGD(AlgorithmConformance):
    algorithm = RelaySGD(patience=30.0)


@pytest.mark.slow
class TestVariants(AlgorithmConformance):
    algorithm = RelaySGD(mode="overlapped", missing="last-average", patience=0.5)
    variants = (
        RelaySGD(variant="grad", patience=30.0),
        RelaySGD(missing="counts", patience=30.0),
        RelaySGD(missing="initial", patience=5.0),
        RelaySGD(mode="overlapped", missing="own", patience=30.0),
        RelaySGD(mode="latest", rate_scale="kappa"),
    )


@pytest.mark.slow
class TestSpanning(AlgorithmConformance):
    algorithm = RelaySGD(tree="spanning", mode="latest")
    variants = (RelaySGD(tree="spanning", mode="overlapped", rate_scale="kappa", patience=30.0),)


@pytest.mark.slow
class TestDoubleBinary(AlgorithmConformance):
    algorithm = RelaySGD(tree="double-binary", patience=30.0)
    variants = (RelaySGD(tree="double-binary", mode="latest"),)
    single = RelaySGD(tree="spanning")
    topologies = MappingProxyType(
        {"double": build("double-binary-trees", 7), "complete": nx.complete_graph(5)}
    )
