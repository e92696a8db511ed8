"""From a name to an algorithm.

An algorithm is installed like any package and is found by its name, which its wheel registers as an
entry point of the group :data:`GROUP`::

    [project.entry-points."flwr_decentral.algorithms"]
    divshare = "flwr_decentral_divshare:DivShare"

The algorithms of this project use the same door. A class that is not installed, such as one of the
user's own app, is named by where it is: ``"my_app.gossip:Gossip"``.
"""

from __future__ import annotations

import dataclasses
import difflib
import importlib
import inspect
import types
import typing
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from importlib.metadata import EntryPoint, entry_points
from typing import Any, Final

from flwr_decentral.core.algorithm import Algorithm
from flwr_decentral.core.errors import ConfigurationError, suggest

GROUP: Final = "flwr_decentral.algorithms"

SHELF: Final[Mapping[str, str]] = {
    "a2cid2": "flwr-decentral-a2cid2",
    "adpsgd": "flwr-decentral-adpsgd",
    "adpsgd-divshare": "flwr-decentral-adpsgd",
    "allreduce": "flwr-decentral-allreduce",
    "divshare": "flwr-decentral-divshare",
    "dpsgd": "flwr-decentral-dpsgd",
    "local": "flwr-decentral-local",
    "relaysgd": "flwr-decentral-relaysgd",
    "swift": "flwr-decentral-swift",
    "swift-divshare": "flwr-decentral-swift",
}
"""The algorithms of this project, and the wheel that brings each."""


@dataclass(frozen=True, kw_only=True)
class Plugin:
    """An installed algorithm, which is imported when it is asked for.

    Attributes
    ----------
    name : str
        The name that it is chosen by.
    value : str
        Where the class is, as ``module:attribute``.
    distribution, version : str
        The package that brought it.
    """

    name: str
    value: str
    distribution: str
    version: str
    _points: tuple[EntryPoint, ...] = field(repr=False, compare=False)

    @cached_property
    def error(self) -> str | None:
        """Why it cannot be used, or None."""
        try:
            _ = self.algorithm
        except ConfigurationError as error:
            return str(error.args[0])
        return None

    @cached_property
    def algorithm(self) -> type[Algorithm]:
        """The class.

        Raises
        ------
        ConfigurationError
            If it cannot be imported, is no algorithm, or several packages claim its name.
        """
        if len(self._points) > 1:
            claims = " and ".join(f"{_source(point)[0]} ({point.value})" for point in self._points)
            raise ConfigurationError(
                f"algorithm {self.name!r} is claimed by {claims}; uninstall one of them, or name "
                "the class that you mean as 'module:attribute'"
            )
        where = f"algorithm {self.name!r} of {self.distribution} {self.version}"
        try:
            loaded = self._points[0].load()
        except Exception as error:  # a stranger's package may raise anything
            raise ConfigurationError(
                f"{where} cannot be imported: {type(error).__name__}: {error}; repair it with: "
                f"pip install --force-reinstall {self.distribution}"
            ) from error
        return _checked(loaded, where)


def installed() -> dict[str, Plugin]:
    """Find every installed algorithm, by name, ascending; none of them is imported."""
    found: defaultdict[str, list[EntryPoint]] = defaultdict(list)
    for point in entry_points(group=GROUP):
        found[point.name].append(point)
    return {name: _plugin(name, tuple(found[name])) for name in sorted(found)}


def load(name: str) -> type[Algorithm]:
    """Find the class of an algorithm.

    Parameters
    ----------
    name : str
        The name of an installed algorithm, or ``"module:attribute"``.

    Raises
    ------
    ConfigurationError
        If there is none, or it cannot be imported. It says what is installed, and how to install
        what is not.
    """
    if ":" in name:
        return _load_own(name)
    plugins = installed()
    if name in plugins:
        return plugins[name].algorithm
    raise ConfigurationError(_unknown(name, list(plugins)))


def make(name: str, /, **parameters: Any) -> Algorithm:
    """Make an algorithm with hyper-parameters.

    Parameters
    ----------
    name : str
        See :func:`load`.
    **parameters
        Its hyper-parameters. Kebab case is accepted for snake case, since run-config keys are
        written so, and an int for a float.

    Raises
    ------
    ConfigurationError
        If there is no such algorithm or hyper-parameter, one is missing, or one has the wrong type.
    """
    algorithm = load(name)
    known = hyperparameters(algorithm)
    hints = _hints(algorithm)
    given: dict[str, Any] = {}
    for spelled, value in parameters.items():
        key = spelled.replace("-", "_")
        if key not in known:
            raise ConfigurationError(
                f"{name} has no hyper-parameter {key!r}; {suggest(key, known)}"
            )
        if key in given:
            raise ConfigurationError(f"{name}: hyper-parameter {key!r} is given twice")
        given[key] = _fitted(value, hints.get(key, Any), f"{name}: hyper-parameter {key!r}")
    for key, default in known.items():
        if default is dataclasses.MISSING and key not in given:
            raise ConfigurationError(f"{name} needs the hyper-parameter {key!r}")
    return algorithm(**given)


def hyperparameters(algorithm: type[Algorithm]) -> dict[str, Any]:
    """List the hyper-parameters of an algorithm with their defaults.

    Returns
    -------
    dict
        In the order in which they are declared; ``dataclasses.MISSING`` where there is no default.
    """
    return {
        known.name: known.default
        if known.default_factory is dataclasses.MISSING
        else known.default_factory()
        for known in dataclasses.fields(algorithm)
        if known.init
    }


def pip_line(name: str) -> str:
    """Write down how an algorithm of the shelf is installed."""
    return f"pip install {SHELF[name]}"


def _plugin(name: str, points: tuple[EntryPoint, ...]) -> Plugin:
    distribution, version = _source(points[0])
    return Plugin(
        name=name,
        value=points[0].value,
        distribution=distribution,
        version=version,
        _points=points,
    )


def _source(point: EntryPoint) -> tuple[str, str]:
    return (point.dist.name, point.dist.version) if point.dist else ("an unknown package", "")


def _checked(loaded: object, where: str) -> type[Algorithm]:
    if not isinstance(loaded, type) or not issubclass(loaded, Algorithm):
        raise ConfigurationError(
            f"{where} is {loaded!r}, which is no class derived from "
            f"{Algorithm.__module__}.{Algorithm.__qualname__}"
        )
    if inspect.isabstract(loaded):
        lacking = ", ".join(sorted(loaded.__abstractmethods__))
        raise ConfigurationError(f"{where} is not complete: it does not implement {lacking}")
    return loaded


def _load_own(name: str) -> type[Algorithm]:
    module, _, attributes = name.partition(":")
    where = f"algorithm {name!r}"
    if not module or not attributes:
        raise ConfigurationError(f"{where} must be named as 'module:attribute'")
    try:
        loaded: Any = importlib.import_module(module)
    except Exception as error:  # and so may the user's module
        if isinstance(error, ModuleNotFoundError) and f"{module}.".startswith(f"{error.name}."):
            raise ConfigurationError(
                f"{where}: there is no module {error.name!r}; it should be one of your app, such "
                "as 'my_app.gossip', or of an installed package"
            ) from error
        raise ConfigurationError(
            f"{where} cannot be imported: {type(error).__name__}: {error}"
        ) from error
    for attribute in attributes.split("."):
        if not hasattr(loaded, attribute):
            classes = [key for key, value in vars(loaded).items() if isinstance(value, type)]
            raise ConfigurationError(
                f"{where}: there is no {attribute!r} in it; {suggest(attribute, classes)}"
            )
        loaded = getattr(loaded, attribute)
    return _checked(loaded, where)


def _unknown(name: str, names: list[str]) -> str:
    """Say that there is no such algorithm, what there is, and what to do."""
    listing = ", ".join(names) or "none"
    if name in SHELF:
        return (
            f"algorithm {name!r} is not installed. Installed are: {listing}. "
            f"Install it with: {pip_line(name)}"
        )
    near = difflib.get_close_matches(name, {*names, *SHELF}, n=1)
    guess = f"; did you mean {near[0]!r}?" if near else "."
    text = (
        f"there is no algorithm {name!r}{guess} Installed are: {listing}. "
        "Name an algorithm of your own as 'module:attribute'"
    )
    if near and near[0] not in names:
        text += f". Install {near[0]!r} with: {pip_line(near[0])}"
    return text


def _hints(algorithm: type[Algorithm]) -> dict[str, Any]:
    try:
        return typing.get_type_hints(algorithm)
    except NameError:
        # A name that is imported for type checkers only: the algorithm's own checks must do.
        return {}


def _fitted(value: Any, hint: Any, what: str) -> Any:
    """Check a value against a field's type; an int becomes a float where one is wanted."""
    union = typing.get_origin(hint) in (typing.Union, types.UnionType)
    kinds = typing.get_args(hint) if union else (hint,)
    if any(_fits(value, kind) for kind in kinds):
        return value
    if float in kinds and _fits(value, int):
        return float(value)
    expected = " or ".join(_spelled(kind) for kind in kinds)
    raise ConfigurationError(f"{what} must be {expected}, got {value!r} ({type(value).__name__})")


def _fits(value: Any, kind: Any) -> bool:
    if kind is Any:
        return True
    if kind in (int, float):
        return isinstance(value, kind) and not isinstance(value, bool)
    if typing.get_origin(kind) is typing.Literal:
        return value in typing.get_args(kind)
    if kind is None or isinstance(kind, type):
        return isinstance(value, kind or types.NoneType)
    return True


def _spelled(kind: Any) -> str:
    if typing.get_origin(kind) is typing.Literal:
        return " or ".join(map(repr, typing.get_args(kind)))
    return "None" if kind is types.NoneType else getattr(kind, "__name__", str(kind))
