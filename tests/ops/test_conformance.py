"""The reference behaves as it demands of others."""

import pytest

from flwr_decentral.ops import Reference
from flwr_decentral.testing.backends import BackendManners


class TestReference(BackendManners):
    @pytest.fixture(scope="class")
    @classmethod
    def ops(cls):
        return Reference()
