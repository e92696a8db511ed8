"""Plugins: from a name to an algorithm, and what is said when there is none."""

import dataclasses
import json
import re
import runpy
import sys
import tomllib
from dataclasses import dataclass
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Literal

import pytest

from flwr_decentral import plugins
from flwr_decentral.core import Algorithm, ConfigurationError, Machine, Site


@dataclass(frozen=True, kw_only=True)
class Gossip(Algorithm):
    name = "gossip"

    local_steps: int = 5
    rate: float = 0.5
    flush: bool = True
    max_age: int | None = None
    order: Literal["first", "last"] = "first"
    sizes: tuple[int, ...] = (1,)

    def machine(self, site: Site) -> Machine:
        raise NotImplementedError


@dataclass(frozen=True, kw_only=True)
class Needy(Gossip):
    must: float


@dataclass(frozen=True, kw_only=True)
class Incomplete(Algorithm):
    name = "incomplete"


@pytest.fixture(autouse=True)
def module(monkeypatch) -> ModuleType:
    """Make the module ``some_package``, which holds the classes above."""
    module = ModuleType("some_package")
    module.Gossip, module.Needy, module.Incomplete = Gossip, Needy, Incomplete
    module.Shelf = type("Shelf", (), {"Gossip": Gossip})
    module.number = 3
    monkeypatch.setitem(sys.modules, "some_package", module)
    return module


@pytest.fixture
def install(monkeypatch):
    """Pretend that exactly these algorithms are installed."""

    def pretend(*plugs: tuple[str, str, str]) -> None:
        points = [
            EntryPoint(name, value, plugins.GROUP)._for(
                SimpleNamespace(name=distribution, version="1.2.3")
            )
            for name, value, distribution in plugs
        ]
        monkeypatch.setattr(plugins, "entry_points", lambda **_: points)

    return pretend


GOSSIP = ("gossip", "some_package:Gossip", "dist-gossip")


def test_installed_algorithms_are_listed_by_name(install):
    install(GOSSIP, ("another", "no_such_package:Gone", "dist-another"))
    found = plugins.installed()
    assert list(found) == ["another", "gossip"]
    gossip = found["gossip"]
    assert (gossip.name, gossip.value) == ("gossip", "some_package:Gossip")
    assert (gossip.distribution, gossip.version) == ("dist-gossip", "1.2.3")
    assert gossip.algorithm is Gossip
    assert gossip.error is None


def test_listing_imports_nothing(install, monkeypatch):
    install(GOSSIP)
    monkeypatch.delitem(sys.modules, "some_package")
    assert list(plugins.installed()) == ["gossip"]


def test_a_broken_plugin_does_not_break_the_others(install, tmp_path, monkeypatch):
    (tmp_path / "broken_package.py").write_text("raise RuntimeError('no such device')")
    monkeypatch.syspath_prepend(tmp_path)
    install(GOSSIP, ("broken", "broken_package:X", "dist-broken"))
    found = plugins.installed()
    assert found["gossip"].error is None
    assert found["broken"].error == (
        "algorithm 'broken' of dist-broken 1.2.3 cannot be imported: RuntimeError: no such device; "
        "repair it with: pip install --force-reinstall dist-broken"
    )
    assert plugins.load("gossip") is Gossip
    with pytest.raises(ConfigurationError, match="no such device"):
        plugins.load("broken")


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("some_package:Missing", "cannot be imported: AttributeError"),
        ("some_package:number", "is 3, which is no class derived from flwr_decentral.core.algo"),
        ("some_package:Shelf", "which is no class derived from"),
        ("some_package:Incomplete", "is not complete: it does not implement machine"),
    ],
)
def test_what_is_no_algorithm_is_refused(install, value, message):
    install(("odd", value, "dist-odd"))
    assert message in plugins.installed()["odd"].error


def test_a_name_that_two_packages_claim_is_refused(install):
    install(GOSSIP, ("gossip", "other_package:Gossip", "dist-other"))
    with pytest.raises(ConfigurationError, match="claimed by") as caught:
        plugins.load("gossip")
    assert "dist-gossip (some_package:Gossip) and dist-other (other_package:Gossip)" in str(
        caught.value
    )
    assert "claimed by" in plugins.installed()["gossip"].error


# --- names ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", plugins.SHELF)
def test_a_shelf_name_that_is_not_installed_prints_its_pip_line(install, name):
    install(GOSSIP)
    with pytest.raises(ConfigurationError) as caught:
        plugins.load(name)
    assert str(caught.value) == (
        f"[configuration] algorithm {name!r} is not installed. Installed are: gossip. "
        f"Install it with: pip install {plugins.SHELF[name]}"
    )


def test_the_nearest_installed_name_is_offered(install):
    install(GOSSIP)
    with pytest.raises(ConfigurationError) as caught:
        plugins.load("gosip")
    assert str(caught.value) == (
        "[configuration] there is no algorithm 'gosip'; did you mean 'gossip'? "
        "Installed are: gossip. Name an algorithm of your own as 'module:attribute'"
    )


def test_the_nearest_shelf_name_is_offered_with_its_pip_line(install):
    install()
    with pytest.raises(ConfigurationError) as caught:
        plugins.load("relay-sgd")
    assert "did you mean 'relaysgd'? Installed are: none." in str(caught.value)
    assert str(caught.value).endswith(
        "Install 'relaysgd' with: pip install flwr-decentral-relaysgd"
    )


def test_a_name_that_resembles_none_gets_no_guess(install):
    install(GOSSIP)
    with pytest.raises(ConfigurationError) as caught:
        plugins.load("zzz")
    assert "there is no algorithm 'zzz'. Installed are: gossip." in str(caught.value)


# --- a class of the user's own --------------------------------------------------------------------


def test_own_classes_are_named_by_where_they_are():
    assert plugins.load("some_package:Gossip") is Gossip
    assert plugins.load("some_package:Shelf.Gossip") is Gossip


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("no_such_app.gossip:Gossip", "there is no module 'no_such_app'; it should be one of your"),
        ("some_package:Gosip", "there is no 'Gosip' in it; did you mean 'Gossip'?"),
        ("some_package:", "must be named as 'module:attribute'"),
        (":Gossip", "must be named as 'module:attribute'"),
        ("some_package:number", "which is no class derived from"),
        ("some_package:Incomplete", "does not implement machine"),
    ],
)
def test_what_is_wrong_with_an_own_class_is_said(name, message):
    with pytest.raises(ConfigurationError, match=re.escape(message)):
        plugins.load(name)


def test_an_own_module_that_fails_keeps_its_cause(tmp_path, monkeypatch):
    (tmp_path / "failing_app.py").write_text("import no_such_dependency")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ConfigurationError, match="No module named 'no_such_dependency'") as caught:
        plugins.load("failing_app:Gossip")
    assert isinstance(caught.value.__cause__, ModuleNotFoundError)


# --- hyper-parameters -----------------------------------------------------------------------------


def make(**parameters) -> Algorithm:
    return plugins.make("some_package:Gossip", **parameters)


def test_defaults():
    assert make() == Gossip()
    assert plugins.hyperparameters(Gossip) == Gossip().parameters
    assert plugins.hyperparameters(Needy)["must"] is dataclasses.MISSING


def test_kebab_case_is_accepted():
    assert make(**{"local-steps": 3, "max-age": 2}) == Gossip(local_steps=3, max_age=2)


def test_an_int_becomes_a_float_where_one_is_wanted():
    rate = make(rate=1).rate
    assert rate == 1.0
    assert isinstance(rate, float)


def test_other_values_are_passed_on_as_they_are():
    assert make(max_age=None, flush=False, order="last", sizes=(2, 3)) == Gossip(
        flush=False, order="last", sizes=(2, 3)
    )


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ({"local_step": 3}, "has no hyper-parameter 'local_step'; did you mean 'local_steps'?"),
        ({"local_steps": 3, "local-steps": 3}, "hyper-parameter 'local_steps' is given twice"),
        ({"local_steps": 3.0}, "hyper-parameter 'local_steps' must be int, got 3.0 (float)"),
        ({"local_steps": True}, "hyper-parameter 'local_steps' must be int, got True (bool)"),
        ({"local_steps": "3"}, "must be int, got '3' (str)"),
        ({"rate": "0.1"}, "hyper-parameter 'rate' must be float, got '0.1' (str)"),
        ({"rate": False}, "must be float, got False (bool)"),
        ({"flush": 1}, "must be bool, got 1 (int)"),
        ({"max_age": "old"}, "must be int or None, got 'old' (str)"),
        ({"order": "any"}, "must be 'first' or 'last', got 'any' (str)"),
    ],
)
def test_unfit_hyperparameters_are_refused(parameters, message):
    with pytest.raises(ConfigurationError, match=re.escape(message)):
        make(**parameters)


def test_a_missing_hyperparameter_is_named():
    with pytest.raises(ConfigurationError, match="needs the hyper-parameter 'must'"):
        plugins.make("some_package:Needy")
    assert plugins.make("some_package:Needy", must=1).must == 1.0


def test_types_that_cannot_be_resolved_are_left_to_the_algorithm(module):
    module.Gossip = type("Odd", (Gossip,), {"__annotations__": {"odd": "NoSuchName"}})
    assert make(rate=2).rate == 2


# --- what is really installed ---------------------------------------------------------------------

REAL = sorted({point.name for point in entry_points(group=plugins.GROUP)} & set(plugins.SHELF))


@pytest.mark.parametrize("name", REAL)
def test_algorithms_of_the_shelf_load_and_are_called_by_their_name(name):
    algorithm = plugins.make(name)
    assert algorithm.name == name
    assert plugins.make(name, **algorithm.parameters) == algorithm
    assert plugins.installed()[name].distribution == plugins.SHELF[name]


ROOT = Path(__file__).parents[1]


def brought() -> dict[str, Path]:
    """List the algorithms that the wheels of this repository bring, with their folders."""
    found = {}
    for path in ROOT.glob("strategies/*/pyproject.toml"):
        project = tomllib.loads(path.read_text())["project"]
        for name in project.get("entry-points", {}).get(plugins.GROUP, {}):
            assert project["name"] == plugins.SHELF[name]
            found[name] = path.parent
    return found


def test_the_shelf_is_what_the_wheels_bring():
    assert brought().keys() == plugins.SHELF.keys()


def test_the_readme_has_every_algorithm_of_the_shelf():
    readme = (ROOT / "README.md").read_text()
    assert re.findall(r"^\| \[`([a-z0-9-]+)`\]", readme, re.MULTILINE) == sorted(plugins.SHELF)
    folders = {f"strategies/{folder.name}" for folder in brought().values()}
    assert set(re.findall(r"-e (strategies/\w+)", readme)) >= folders


def section(name: str) -> str:
    """Find what the card of a wheel says of one of its algorithms."""
    card = (brought()[name] / "README.md").read_text()
    parts = re.split(r"^## (?=[a-z-]+$)", card, flags=re.MULTILINE)
    variants = {part.partition("\n")[0]: part for part in parts[1:]}
    return variants.get(name, parts[0])


@pytest.mark.parametrize("name", plugins.SHELF)
def test_a_card_has_every_hyperparameter_with_its_default(name):
    known = plugins.hyperparameters(plugins.load(name))
    rows = dict(re.findall(r"^\| `(\w+)` (\|.*)", section(name), re.MULTILINE))
    assert rows.keys() == known.keys()
    for key, default in known.items():
        assert f"| `{json.dumps(default)}` |" in rows[key], f"{key} = {default!r}"


def test_every_algorithm_of_the_shelf_is_checked_by_the_kit():
    from flwr_decentral.testing.conformance import AlgorithmConformance

    checked = set()
    for path in ROOT.glob("strategies/*/tests/test_conformance.py"):
        for value in runpy.run_path(str(path)).values():
            if isinstance(value, type) and issubclass(value, AlgorithmConformance):
                checked |= {value.algorithm.name} if hasattr(value, "algorithm") else set()
    assert checked == plugins.SHELF.keys()
