"""The world a run takes place in: network, compute times, outages, partitions.

A :class:`Scenario` is a frozen value that a user writes down once, in Python, in a TOML file or as
run-config keys, and that knows nothing of the number of nodes yet::

    [network]
    uplink = "60 Mbit/s"  # or bits per second, or one entry per node; unlimited if absent
    downlink = "100 Mbit/s"
    latency = "20 ms"  # or seconds, or an n x n matrix, row = sender
    loss = 0.01  # probability that a message is lost

    [compute]
    seconds = 1.0  # one local round of a node of factor 1
    stragglers = 0.5  # this share of the nodes, chosen by the run seed,
    slowdown = 5.0  # takes this many times as long
    # factors = [1.0, 1.0, 5.0]     # or a factor for each node instead of stragglers
    # trace = "trace.json"          # or a row of seconds for each node instead of seconds

    [[outages]]
    node = 3
    start = 10.0
    end = 25.0  # never returns if absent

    [[partitions]]
    groups = [[0, 1], [2, 3]]  # all other nodes form one more group
    start = 40.0
    end = 60.0

Wherever a list or a matrix may stand, so may the path of a ``.json`` file that holds it. Values are
read when a scenario is made: it then holds seconds, bits per second and tuples only, depends on no
file, and equals what is read back from :meth:`Scenario.to_toml`. :meth:`Scenario.resolve` turns it
into the :class:`~flwr_decentral.sim.conditions.Conditions` of a run.
"""

from __future__ import annotations

import difflib
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields
from pathlib import Path
from typing import Any, Final, TypeVar, cast

from flwr_decentral.core.errors import ConfigurationError, suggest
from flwr_decentral.core.seeds import Seeds

from . import quantities as read
from .conditions import Conditions, resolve
from .parts import Compute, Network, Outage, Partition

__all__ = ["Compute", "Conditions", "Network", "Outage", "Partition", "Scenario"]

_Part = TypeVar("_Part")


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """The world a run takes place in.

    Parameters
    ----------
    network : Network
        What the links can do.
    compute : Compute
        How long the nodes compute.
    outages : sequence of Outage
        When nodes are down; outages of one node may overlap and then count as one.
    partitions : sequence of Partition
        When the network is split; partitions may overlap and then all hold.

    Examples
    --------
    >>> scenario = Scenario(network=Network(uplink="10 Mbit/s"), compute=Compute(seconds="500 ms"))
    >>> Scenario.from_toml(scenario.to_toml()) == scenario
    True
    >>> scenario.resolve(4, Seeds(1)).duration_ns(node=0, round=1)
    500000000
    """

    network: Network = field(default_factory=Network)
    compute: Compute = field(default_factory=Compute)
    outages: Sequence[Outage] = ()
    partitions: Sequence[Partition] = ()

    def __post_init__(self) -> None:
        for name, kind in _SECTIONS.items():
            if not isinstance(getattr(self, name), kind):
                raise read.fail(name, f"a {kind.__name__}", getattr(self, name))
        for name, kind in _LISTS.items():
            parts = getattr(self, name)
            if not read.is_sequence(parts) or not all(isinstance(part, kind) for part in parts):
                raise read.fail(name, f"a list of {kind.__name__}s", parts)
            object.__setattr__(self, name, tuple(parts))

    @classmethod
    def from_mapping(cls, mapping: Mapping[str, Any], folder: str | Path | None = None) -> Scenario:
        """Make a scenario from nested mappings and lists.

        Parameters
        ----------
        mapping : mapping
            The sections ``network`` and ``compute``, and the lists ``outages`` and ``partitions``.
            None or empty text stands for a default.
        folder : path, optional
            What the paths of files are relative to; by default the working directory.

        Raises
        ------
        ConfigurationError
            If a key is unknown, or a value is missing, has the wrong type or is out of range.
        """
        _refuse_unknown(mapping, (*_SECTIONS, *_LISTS), "the scenario")
        parts: dict[str, Any] = {}
        where = None if folder is None else Path(folder)
        for name, kind in _SECTIONS.items():
            if not _is_default(mapping.get(name)):
                parts[name] = _make(kind, mapping[name], name, where)
        for name, kind in _LISTS.items():
            entries = mapping.get(name)
            if _is_default(entries):
                continue
            if not read.is_sequence(entries):
                raise read.fail(name, f"a list of tables ([[{name}]])", entries)
            parts[name] = tuple(
                _make(kind, entry, f"{name}[{number}]", where)
                for number, entry in enumerate(entries)
            )
        return cls(**parts)

    @classmethod
    def from_toml(cls, text: str, folder: str | Path | None = None) -> Scenario:
        """Make a scenario from TOML text. See :meth:`from_mapping`."""
        try:
            mapping = tomllib.loads(text)
        except tomllib.TOMLDecodeError as error:
            raise ConfigurationError(f"the scenario is not valid TOML: {error}") from None
        return cls.from_mapping(mapping, folder)

    @classmethod
    def from_file(cls, path: str | Path) -> Scenario:
        """Make a scenario from a TOML file; paths in it are relative to its folder."""
        path = Path(path)
        text = read.read_text(path, "scenario")
        try:
            return cls.from_toml(text, path.parent)
        except ConfigurationError as error:
            raise ConfigurationError(f"{path}: {error.args[0]}") from None

    @classmethod
    def from_run_config(
        cls, config: Mapping[str, Any], folder: str | Path | None = None
    ) -> Scenario:
        """Make a scenario from the keys of a run-config that begin with a section's name.

        Parameters
        ----------
        config : mapping
            Flat, with dotted keys such as ``"network.uplink"``. Keys of no section belong to the
            app and are ignored, unless they are ours but for a slip in the section's name.
        folder : path, optional
            What the paths of files are relative to; by default the working directory.

        Raises
        ------
        ConfigurationError
            As :meth:`from_mapping` does.
        """
        nested: dict[str, dict[str, Any]] = {name: {} for name in _SECTIONS}
        for key, value in config.items():
            section, dot, name = key.partition(".")
            if dot and section in nested:
                nested[section][name] = value
            elif dot:
                _refuse_slip(section, name)
        return cls.from_mapping(nested, folder)

    def warnings(self) -> list[str]:
        """List what can be carried out, but can hardly have been meant."""
        compute = self.compute
        if compute.stragglers and compute.slowdown == 1:
            return [
                f"compute.stragglers = {compute.stragglers} changes nothing while compute.slowdown "
                "is 1: say how many times as long stragglers take"
            ]
        return []

    def to_mapping(self) -> dict[str, Any]:
        """Write the scenario down as nested dicts and lists of plain numbers."""
        mapping: dict[str, Any] = {name: _plain(getattr(self, name)) for name in _SECTIONS}
        for name in _LISTS:
            if getattr(self, name):
                mapping[name] = [_plain(part) for part in getattr(self, name)]
        return mapping

    def to_toml(self) -> str:
        """Write the scenario down as TOML text, which :meth:`from_toml` reads back."""
        sections = self.to_mapping()
        blocks = [(f"[{name}]", sections[name]) for name in _SECTIONS]
        blocks += [(f"[[{name}]]", entry) for name in _LISTS for entry in sections.get(name, ())]
        return "\n".join(
            "".join([f"{title}\n", *(f"{key} = {value!r}\n" for key, value in table.items())])
            for title, table in blocks
        )

    def resolve(self, nodes: int, seeds: Seeds) -> Conditions:
        """Work out what the scenario means for a number of nodes.

        Parameters
        ----------
        nodes : int
            The number of nodes, n.
        seeds : Seeds
            The run's seeds; the purpose ``"stragglers"`` chooses the stragglers.

        Raises
        ------
        ConfigurationError
            If a list has not one entry for each node, or a node's index is not below n.
        """
        return resolve(self, nodes, seeds)


_SECTIONS: Final[Mapping[str, type]] = {"network": Network, "compute": Compute}
_LISTS: Final[Mapping[str, type]] = {"outages": Outage, "partitions": Partition}


def _make(kind: type[_Part], entry: object, where: str, folder: Path | None) -> _Part:
    """Make one part of a scenario from what was read for it."""
    if not isinstance(entry, Mapping):
        raise read.fail(where, f"a table of {', '.join(_keys(kind))}", entry)
    _refuse_unknown(entry, _keys(kind), where)
    given = {
        key: read.inline(value, f"{where}.{key}", folder)
        for key, value in entry.items()
        if not _is_default(value)
    }
    for known in fields(cast(Any, kind)):
        if known.default is MISSING and known.name not in given:
            raise ConfigurationError(f"{where}: {known.name} is missing")
    return kind(**given)


def _keys(kind: type) -> list[str]:
    return [known.name for known in fields(cast(Any, kind))]


def _refuse_unknown(mapping: Mapping[str, Any], known: Iterable[str], where: str) -> None:
    names = list(known)
    for key in mapping:
        if key not in names:
            raise ConfigurationError(f"unknown key {key!r} in {where}; {suggest(str(key), names)}")


def _refuse_slip(section: str, name: str) -> None:
    for near in difflib.get_close_matches(section, _SECTIONS, n=1, cutoff=0.75):
        if name in _keys(_SECTIONS[near]):
            raise ConfigurationError(
                f"unknown run-config key '{section}.{name}'; did you mean '{near}.{name}'?"
            )


def _is_default(value: object) -> bool:
    return value is None or (isinstance(value, str) and not value.strip())


def _plain(part: object) -> dict[str, Any]:
    """Write one part down, without the keys that stand for nothing."""
    values = {name: getattr(part, name) for name in _keys(type(part))}
    return {name: _listed(value) for name, value in values.items() if value is not None}


def _listed(value: object) -> object:
    return [_listed(entry) for entry in value] if isinstance(value, tuple) else value
