import pytest

from .loopback import Passports

LONG = {"test_free_run.py", "test_together.py", "test_trouble.py"}


@pytest.hookimpl(tryfirst=True)  # before tests are selected by their marks
def pytest_collection_modifyitems(items) -> None:
    """Count what waits for real clocks, and replays of storms, among the slow tests."""
    for item in items:
        stormy = item.path.name == "test_replay.py" and "storm" in item.name
        if item.path.parent.name == "channel" and (stormy or item.path.name in LONG):
            item.add_marker(pytest.mark.slow)


@pytest.fixture(scope="session")
def passports(tmp_path_factory) -> Passports:
    """Make the certificates of all tests, once."""
    return Passports(tmp_path_factory.mktemp("passports"))
