from flwr_decentral.testing.conformance import AlgorithmConformance
from flwr_decentral_divshare import DivShare


class TestDivShare(AlgorithmConformance):
    algorithm = DivShare(fragments=3, degree=2)
    single = DivShare(fragments=1, degree=2)
    variants = (DivShare(fragments=2, degree=1, flush=False, max_age=2, partition="layerwise"),)
