from flwr_decentral.testing.conformance import AlgorithmConformance

from flwr_decentral_divshare import DivShare


class TestDivShare(AlgorithmConformance):
    algorithm = DivShare(fragments=4, degree=2)
    single = DivShare(fragments=1, degree=2)
    variants = (
        DivShare(fragments=3, degree=9, flush=False),
        DivShare(fragments=4, degree=1, max_age=2, partition="layerwise"),
    )
