"""The checks that every backend passes, of the CUDA backend on the emulated GPU."""

import pytest

from flwr_decentral.testing.backends import BackendConformance


@pytest.mark.slow
class TestEmulatedCuda(BackendConformance):
    @pytest.fixture(scope="class")
    @classmethod
    def ops(cls, emulated):
        return emulated[0]
