"""The fault matrices of the conformance kit are most of its time: they are among the slow tests."""

import pytest


@pytest.hookimpl(tryfirst=True)  # before tests are selected by their marks
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark them."""
    for item in items:
        if item.path.name == "test_conformance.py" and item.name.startswith("test_survives"):
            item.add_marker(pytest.mark.slow)
