import pytest

from flwr_decentral.testing.conformance import AlgorithmConformance
from flwr_decentral_swift import SWIFT
from flwr_decentral_swift.divshare import SWIFTDivShare


class TestSWIFT(AlgorithmConformance):
    algorithm = SWIFT()


@pytest.mark.slow
class TestVariants(AlgorithmConformance):
    algorithm = SWIFT(every=3)
    variants = (
        SWIFT(influence="measured", window=3, missing="boost"),
        SWIFT(memory="low", missing="boost"),
        SWIFT(memory="low", flush=False),
        SWIFT(max_age=4, influence="measured", window=1),
    )


class TestDivShareBaseline(AlgorithmConformance):
    algorithm = SWIFTDivShare(degree=4)
