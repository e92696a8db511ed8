from importlib.metadata import EntryPoint

import pytest

from flwr_decentral import ops
from flwr_decentral.core import ConfigurationError
from flwr_decentral.ops import GROUP, VARIABLE, Reference, available, choose


class Other:
    """Stands for a backend that is installed."""

    name = "other"


@pytest.fixture(autouse=True)
def _installed(monkeypatch):
    point = EntryPoint(name="other", value=f"{__name__}:Other", group=GROUP)
    monkeypatch.setattr(point.__class__, "load", lambda _: Other)
    monkeypatch.setattr(ops, "entry_points", lambda group: [point] if group == GROUP else [])
    monkeypatch.delenv(VARIABLE, raising=False)


def test_the_reference_is_the_default():
    assert isinstance(choose(), Reference)


def test_the_environment_decides(monkeypatch):
    monkeypatch.setenv(VARIABLE, "other")
    assert isinstance(choose(), Other)
    monkeypatch.setenv(VARIABLE, "")
    assert isinstance(choose(), Reference)


def test_the_call_overrules_the_environment(monkeypatch):
    monkeypatch.setenv(VARIABLE, "other")
    assert isinstance(choose("reference"), Reference)
    monkeypatch.setenv(VARIABLE, "reference")
    assert isinstance(choose("other"), Other)


def test_what_is_installed_is_listed_with_where_it_comes_from():
    assert available() == {
        "reference": "flwr_decentral.ops.reference:Reference",
        "other": f"{__name__}:Other",
    }


def test_an_unknown_backend_is_never_replaced_by_another(monkeypatch):
    with pytest.raises(ConfigurationError, match=r"'othr' .*FLWR_DECENTRAL_OPS.*'other'\?"):
        choose("othr")
    monkeypatch.setenv(VARIABLE, "cuda")
    with pytest.raises(ConfigurationError, match=r"'cuda' .* known: other, reference"):
        choose()
