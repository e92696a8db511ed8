"""What a user may set, and where it comes from.

Each setting is an argument of :func:`~flwr_decentral.flower.strategy.decentral` or, in kebab case,
a key of the app's run-config; an argument wins. Hyper-parameters of an algorithm are arguments too,
or keys in a table of the algorithm's name, so that ``--run-config 'algorithm="dpsgd"'`` swaps the
algorithm and leaves the others' parameters where they are:

    [tool.flwr.app.config]
    algorithm = "divshare"
    topology = ""                  # an empty text, or 0, asks for the default

    [tool.flwr.app.config.divshare]
    fragments = 10
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from types import NoneType
from typing import Any, Final, Literal, TypeAlias

import networkx as nx
from flwr.app import MetricRecord, RecordDict

from flwr_decentral.core import Algorithm, ConfigurationError, suggest
from flwr_decentral.core.layout import PRIVATE_BY_DEFAULT
from flwr_decentral.plugins import load, make
from flwr_decentral.sim.scenario import Scenario

AggregateFn: TypeAlias = Callable[[list[RecordDict], str], MetricRecord]


@dataclass(frozen=True, kw_only=True)
class FedAvgOptions:
    """FedAvg's keyword arguments, as far as they make sense without a server.

    Attributes
    ----------
    fraction_train : float (default: 1.0)
        Must be 1: there is no server to choose who trains.
    fraction_evaluate : float (default: 1.0)
        The share of nodes that evaluate, chosen anew each time by the run seed; 0 for none.
    min_train_nodes, min_evaluate_nodes, min_available_nodes : int (default: 1)
        The run is refused with fewer nodes than the first or the last; the second is the least
        number of nodes that evaluate.
    weighted_by_key : str (default: "num-examples")
        The metric by which averages of metrics are weighted.
    arrayrecord_key, configrecord_key : str (default: "arrays", "config")
        Names of the records that the user's functions get.
    train_metrics_aggr_fn, evaluate_metrics_aggr_fn : callable, optional
        ``(list of RecordDict, weighted_by_key) -> MetricRecord``; by default the weighted average.
    """

    fraction_train: float = 1.0
    fraction_evaluate: float = 1.0
    min_train_nodes: int = 1
    min_evaluate_nodes: int = 1
    min_available_nodes: int = 1
    weighted_by_key: str = "num-examples"
    arrayrecord_key: str = "arrays"
    configrecord_key: str = "config"
    train_metrics_aggr_fn: AggregateFn | None = None
    evaluate_metrics_aggr_fn: AggregateFn | None = None

    def __post_init__(self) -> None:
        _check_types(self, _OPTION_TYPES)
        if self.fraction_train != 1.0:
            raise ConfigurationError(
                f"fraction_train={self.fraction_train} cannot be honored: no server chooses who "
                "trains, every node does. Model absent nodes with outages in a scenario, or slow "
                "ones with compute.stragglers"
            )
        if not 0 <= self.fraction_evaluate <= 1:
            raise ConfigurationError(
                f"fraction_evaluate must be in [0, 1], got {self.fraction_evaluate}"
            )


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What decides a run besides the algorithm, the model and FedAvg's arguments.

    Attributes
    ----------
    topology : str, pathlib.Path or networkx.Graph, optional
        Who may talk to whom; by default what suits the algorithm.
    scenario : Scenario, str or pathlib.Path, optional
        Network, compute times and outages, or the TOML file that describes them; by default what
        the run-config says under ``network.`` and ``compute.``.
    seed : int (default: 1)
        The run seed.
    duration : float, optional
        Virtual seconds to run for, instead of a number of rounds.
    evaluate_every : int (default: 0)
        Rounds between evaluations; 0 spreads ten of them over the run.
    results_dir : str or pathlib.Path, optional
        Where to write results; by default ``decentral`` in Flower's home.
    dispatch : {"packed", "message"} (default: "packed")
        How tasks go to the clients. Results are the same.
    transcript : bool (default: False)
        Whether to write every event and command beside the results.
    private_keys : sequence of str
        Name patterns of tensors that stay on their node; by default running statistics.
    frozen_keys : sequence of str
        Name patterns of tensors that never change.
    setup_timeout : float (default: 300.0)
        Seconds to wait for nodes to register and to answer.
    real_time : bool (default: False)
        In a simulation: whether the nodes gossip by themselves, in real time, as they do in a
        deployment. Each needs a client of the Simulation Engine that runs all the time.
    segment : float (default: 120.0)
        In real time: seconds from one report of the nodes to the next, about.
    fetch_average : bool (default: False)
        In real time: whether the nodes send their models at evaluations and at the end, so that
        the average can be evaluated and returned. Otherwise no model ever leaves the nodes.
    resume : str (default: "")
        In a deployment: the name under which nodes keep their models beyond the run, and from which
        another run goes on.
    """

    topology: str | Path | nx.Graph[int] | None = None
    scenario: Scenario | str | Path | None = None
    seed: int = 1
    duration: float | None = None
    evaluate_every: int = 0
    results_dir: str | Path | None = None
    dispatch: Literal["packed", "message"] = "packed"
    transcript: bool = False
    private_keys: tuple[str, ...] = PRIVATE_BY_DEFAULT
    frozen_keys: tuple[str, ...] = ()
    setup_timeout: float = 300.0
    real_time: bool = False
    segment: float = 120.0
    fetch_average: bool = False
    resume: str = ""

    def __post_init__(self) -> None:
        _check_types(self, _ARGUMENTS)
        if self.dispatch not in ("packed", "message"):
            raise ConfigurationError(
                f"dispatch={self.dispatch!r}: {suggest(str(self.dispatch), ['packed', 'message'])}"
            )
        if self.duration is not None and not 0 < self.duration < math.inf:
            raise ConfigurationError(f"duration must be positive and finite, got {self.duration} s")
        if not 0 < self.setup_timeout < math.inf:
            raise ConfigurationError(
                f"setup_timeout must be positive and finite, got {self.setup_timeout} s"
            )
        if not 0 < self.segment < math.inf:
            raise ConfigurationError(f"segment must be positive and finite, got {self.segment} s")
        if self.evaluate_every < 0:
            raise ConfigurationError(
                f"evaluate_every counts rounds, 0 or more, got {self.evaluate_every}"
            )


@dataclass(frozen=True, kw_only=True)
class Resolved:
    """The outcome of :func:`resolve`."""

    algorithm: Algorithm
    settings: Settings
    options: FedAvgOptions
    scenario: Scenario = field(default_factory=Scenario)


_NUMBER: Final = (int, float)
_OPTION_TYPES: Final[Mapping[str, tuple[type, ...]]] = {
    "fraction_train": _NUMBER,
    "fraction_evaluate": _NUMBER,
    "min_train_nodes": (int,),
    "min_evaluate_nodes": (int,),
    "min_available_nodes": (int,),
    "weighted_by_key": (str,),
    "arrayrecord_key": (str,),
    "configrecord_key": (str,),
    "train_metrics_aggr_fn": (Callable, NoneType),  # type: ignore[dict-item]
    "evaluate_metrics_aggr_fn": (Callable, NoneType),  # type: ignore[dict-item]
}
_ARGUMENTS: Final[Mapping[str, tuple[type, ...]]] = {
    "topology": (str, Path, nx.Graph, NoneType),
    "scenario": (Scenario, str, Path, NoneType),
    "seed": (int,),
    "duration": (*_NUMBER, NoneType),
    "evaluate_every": (int,),
    "results_dir": (str, Path, NoneType),
    "dispatch": (str,),
    "transcript": (bool,),
    "private_keys": (tuple,),
    "frozen_keys": (tuple,),
    "setup_timeout": _NUMBER,
    "real_time": (bool,),
    "segment": _NUMBER,
    "fetch_average": (bool,),
    "resume": (str,),
}


def _check_types(values: object, types: Mapping[str, tuple[type, ...]]) -> None:
    """Refuse an argument of another type; a bool is no number."""
    for name, expected in types.items():
        value = getattr(values, name)
        if isinstance(value, expected) and (bool in expected or not isinstance(value, bool)):
            continue
        words = " or ".join("None" if kind is NoneType else kind.__name__ for kind in expected)
        raise ConfigurationError(f"{name} must be {words}, got {value!r}")


_SETTINGS: Final = {entry.name for entry in fields(Settings)}
_OPTIONS: Final = {entry.name for entry in fields(FedAvgOptions)}
_TYPES: Final[Mapping[str, type | tuple[type, ...]]] = {
    "topology": str,
    "scenario": str,
    "seed": int,
    "duration": (int, float),
    "evaluate_every": int,
    "results_dir": str,
    "dispatch": str,
    "transcript": bool,
    "private_keys": str,
    "frozen_keys": str,
    "setup_timeout": (int, float),
    "real_time": bool,
    "segment": (int, float),
    "fetch_average": bool,
    "resume": str,
}
"""What a run-config may hold for each setting."""


def resolve(
    algorithm: str | Algorithm,
    run_config: Mapping[str, Any] | None,
    arguments: Mapping[str, Any],
) -> Resolved:
    """Sort arguments and run-config keys into algorithm, settings and FedAvg's options.

    Raises
    ------
    ConfigurationError
        If something is unknown, with the nearest known name, or cannot be.
    """
    config = dict(run_config or {})
    settings = _from_run_config(config)
    settings.update({key: arguments[key] for key in arguments if key in _SETTINGS})
    options = {key: arguments[key] for key in arguments if key in _OPTIONS}
    rest = {
        key: value
        for key, value in arguments.items()
        if key not in _SETTINGS and key not in _OPTIONS
    }
    made = _make_algorithm(algorithm, config, rest)
    for key in ("private_keys", "frozen_keys"):
        if key in settings:
            settings[key] = _patterns(settings[key])
    chosen = Settings(**settings)
    return Resolved(
        algorithm=made,
        settings=chosen,
        options=FedAvgOptions(**options),
        scenario=_scenario(chosen, config),
    )


def _from_run_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """Take the settings out of a run-config; empty values mean the default."""
    found = {}
    for name in _SETTINGS:
        key = name.replace("_", "-")
        value = config.get(key)
        if value is None or value == "" or (value == 0 and name != "seed"):
            continue
        expected = _TYPES[name]
        if not isinstance(value, expected) or (isinstance(value, bool) and expected is not bool):
            words = expected if isinstance(expected, tuple) else (expected,)
            raise ConfigurationError(
                f"run-config {key} must be {' or '.join(word.__name__ for word in words)}, "
                f"got {value!r}"
            )
        found[name] = value
    return found


def _patterns(value: object) -> tuple[str, ...]:
    """Split comma-separated patterns; ``none`` is no pattern at all."""
    if not isinstance(value, str):
        if not isinstance(value, list | tuple) or not all(isinstance(part, str) for part in value):
            raise ConfigurationError(f"patterns of keys must be strings, got {value!r}")
        return tuple(value)
    if value.strip() == "none":
        return ()
    return tuple(part.strip() for part in value.split(",") if part.strip())


def _make_algorithm(
    algorithm: str | Algorithm, config: Mapping[str, Any], arguments: Mapping[str, Any]
) -> Algorithm:
    if not isinstance(algorithm, str | Algorithm):
        raise ConfigurationError(
            f"an algorithm is a name, 'module:Class', or an instance, got {algorithm!r}"
        )
    if isinstance(algorithm, Algorithm):
        if arguments:
            name = next(iter(arguments))
            raise ConfigurationError(
                f"unknown argument {name!r}; {suggest(name, _SETTINGS | _OPTIONS)}; "
                f"{algorithm} has been given its hyper-parameters already"
            )
        return algorithm
    kind = load(algorithm)
    prefix = f"{kind.name}."
    parameters = {
        key.removeprefix(prefix).replace("-", "_"): value
        for key, value in config.items()
        if key.startswith(prefix) and value != ""
    }
    known = [entry.name for entry in fields(kind)]
    for name in arguments:
        if name.replace("-", "_") not in known:
            raise ConfigurationError(
                f"unknown argument {name!r}: it is neither a hyper-parameter of {kind.name} nor a "
                f"setting; {suggest(name, {*known, *_SETTINGS, *_OPTIONS})}"
            )
    return make(algorithm, **{**parameters, **arguments})


def _scenario(settings: Settings, config: Mapping[str, Any]) -> Scenario:
    given = settings.scenario
    if isinstance(given, Scenario):
        return given
    if given is None:
        found = {
            key: str(find_in_app(value)) if str(value).endswith(".json") else value
            for key, value in config.items()
        }
        return Scenario.from_run_config(found)
    return Scenario.from_file(find_in_app(given))


def find_in_app(path: str | Path) -> Path:
    """Find a file that was shipped in the app bundle.

    Flower puts the folder of the unpacked app on the import path, and starts the ServerApp in
    whatever folder the SuperLink was started in, so both are searched.
    """
    path = Path(path)
    if path.is_absolute():
        return path
    folders = [*(Path(entry) for entry in sys.path if entry), Path.cwd()]
    return next((folder / path for folder in folders if (folder / path).is_file()), path)
