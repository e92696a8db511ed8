from flwr_decentral.testing.conformance import AlgorithmConformance
from flwr_decentral_a2cid2 import A2CiD2


class TestA2CiD2(AlgorithmConformance):
    algorithm = A2CiD2()
    variants = (A2CiD2(momentum=False, pacing="paced", patience=0.5),)
