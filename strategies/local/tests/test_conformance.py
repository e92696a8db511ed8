from flwr_decentral.testing.conformance import AlgorithmConformance
from flwr_decentral_local import LocalOnly


class TestLocalOnly(AlgorithmConformance):
    algorithm = LocalOnly()
