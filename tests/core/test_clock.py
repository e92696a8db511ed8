import pytest
from hypothesis import given
from hypothesis import strategies as st

from flwr_decentral.core import MILLISECOND, SECOND, from_seconds, to_seconds
from flwr_decentral.core.clock import MICROSECOND, NANOSECOND


def test_units():
    assert SECOND == 1000 * MILLISECOND == 10**6 * MICROSECOND == 10**9 * NANOSECOND
    assert all(type(unit) is int for unit in (SECOND, MILLISECOND, MICROSECOND, NANOSECOND))


@pytest.mark.parametrize(
    ("seconds", "nanoseconds"),
    [
        (0, 0),
        (-0.0, 0),
        (1, SECOND),
        (0.1, 100 * MILLISECOND),
        (1.4e-9, 1),
        (1.6e-9, 2),
        (5e-324, 0),
        (0.1 + 0.2, 300 * MILLISECOND),
        (10**9, 10**18),
    ],
)
def test_seconds_are_rounded_to_integer_nanoseconds(seconds, nanoseconds):
    result = from_seconds(seconds)
    assert result == nanoseconds
    assert type(result) is int


@pytest.mark.parametrize("seconds", [-1e-9, -1, float("inf"), float("-inf"), float("nan")])
def test_what_is_no_duration_is_refused(seconds):
    with pytest.raises(ValueError, match="finite and not negative"):
        from_seconds(seconds)


@given(st.integers(0, 10**6 * SECOND))
def test_there_and_back(nanoseconds):
    assert from_seconds(to_seconds(nanoseconds)) == nanoseconds
