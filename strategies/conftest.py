"""The long checks of the conformance kit, runs under faults above all, are among the slow tests."""

from typing import Final

import pytest

_LONG: Final = (
    "test_answers_the_same_event",
    "test_counts_duplicates",
    "test_does_its_arithmetic",
    "test_does_the_same_in_real_time",
    "test_goes_on_from_any_snapshot",
    "test_leaves",
    "test_never_takes_in",
    "test_repeats_in_a_fresh_process",
    "test_survives",
)


@pytest.hookimpl(tryfirst=True)  # before tests are selected by their marks
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark them."""
    for item in items:
        if item.path.name == "test_conformance.py" and item.name.startswith(_LONG):
            item.add_marker(pytest.mark.slow)
