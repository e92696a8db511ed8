import pytest

from .loopback import Passports


@pytest.fixture(scope="session")
def passports(tmp_path_factory) -> Passports:
    """Make the certificates of all tests, once."""
    return Passports(tmp_path_factory.mktemp("passports"))
