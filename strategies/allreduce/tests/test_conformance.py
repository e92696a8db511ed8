import pytest

from flwr_decentral.testing.conformance import AlgorithmConformance
from flwr_decentral_allreduce import AllReduce


class TestAllReduce(AlgorithmConformance):
    algorithm = AllReduce(chunks=1, patience=60.0)


@pytest.mark.slow
class TestChunks(AlgorithmConformance):
    algorithm = AllReduce(patience=60.0)
    variants = (AllReduce(chunks=3, retry=0.1, patience=5.0),)
    single = AllReduce()
