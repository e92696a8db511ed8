"""The toys are algorithms like any other."""

from flwr_decentral.testing.conformance import AlgorithmConformance
from flwr_decentral.testing.toys import Gossip, Lockstep


class TestGossip(AlgorithmConformance):
    algorithm = Gossip()
    registered = False


class TestLockstep(AlgorithmConformance):
    algorithm = Lockstep()
    variants = (Lockstep(patience=3.0),)
    registered = False
