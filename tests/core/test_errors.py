import pytest

from flwr_decentral.core import (
    AlgorithmError,
    ConfigurationError,
    DecentralError,
    PeerError,
    RuntimeFault,
    suggest,
)


@pytest.mark.parametrize(
    ("kind", "fault"),
    [
        (ConfigurationError, "configuration"),
        (AlgorithmError, "algorithm"),
        (PeerError, "peer"),
        (RuntimeFault, "runtime"),
    ],
)
def test_every_error_says_whose_fault_it_is(kind, fault):
    error = kind("it is broken")
    assert error.fault == fault
    assert str(error) == f"[{fault}] it is broken"
    assert isinstance(error, DecentralError)


def test_errors_can_be_caught_as_what_python_calls_them():
    assert issubclass(ConfigurationError, ValueError)
    assert issubclass(PeerError, ValueError)
    assert issubclass(RuntimeFault, RuntimeError)
    assert not issubclass(AlgorithmError, ValueError)


@pytest.mark.parametrize(
    ("name", "known", "expected"),
    [
        ("divshar", ["dpsgd", "divshare"], "did you mean 'divshare'? known: divshare, dpsgd"),
        ("xyz", ["dpsgd", "divshare"], "known: divshare, dpsgd"),
        ("xyz", iter(["b", "a"]), "known: a, b"),
        ("", [], "known: none"),
        ("ring", {"ring": 1}, "did you mean 'ring'? known: ring"),
    ],
)
def test_suggest_names_the_nearest_and_all(name, known, expected):
    assert suggest(name, known) == expected
