from flwr_decentral.testing.conformance import AlgorithmConformance

from flwr_decentral_dpsgd import DPSGD


class TestDPSGD(AlgorithmConformance):
    algorithm = DPSGD(patience=30.0)
    variants = (
        DPSGD(order="combine-then-adapt", patience=30.0),
        DPSGD(average="plain", patience=0.5),
        DPSGD(missing="renormalize", order="combine-then-adapt", patience=30.0),
    )
