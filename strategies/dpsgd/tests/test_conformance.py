from flwr_decentral.testing.conformance import AlgorithmConformance
from flwr_decentral_dpsgd import DPSGD


class TestDPSGD(AlgorithmConformance):
    algorithm = DPSGD(patience=30.0)
    variants = (DPSGD(order="combine-then-adapt", missing="renormalize", patience=0.5),)
