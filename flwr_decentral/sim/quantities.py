"""Reading what a user writes for a number, a time, a bandwidth, or one of these for each node.

Every reader takes the key that a value was found under and names it in what it raises. Every reader
takes what it has returned, too, so that a value can be read again.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction
from numbers import Integral, Real
from pathlib import Path
from typing import Any, Final, TypeAlias, TypeGuard

from flwr_decentral.core.errors import ConfigurationError

Reader: TypeAlias = Callable[[Any, str], float]

BUNDLED: Final = (".py", ".toml", ".md", ".yaml", ".yml", ".json", ".jsonl")
"""Suffixes of the files that Flower puts into an app bundle."""

_MOST: Final = 1e12
"""The longest time in seconds, and the largest factor: no product of them overflows."""

_QUANTITY: Final = re.compile(r"\s*(\d+(?:\.\d*)?|\.\d+)\s*([A-Za-zµμ/]+)\s*")
_SECONDS: Final = {
    "ns": Fraction(1, 10**9),
    "us": Fraction(1, 10**6),
    "µs": Fraction(1, 10**6),  # the micro sign
    "μs": Fraction(1, 10**6),  # and the Greek letter
    "ms": Fraction(1, 10**3),
    "s": Fraction(1),
    "min": Fraction(60),
    "h": Fraction(3600),
}
_PREFIXES: Final = {"": 1, "k": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}
_BITS_PER_SECOND: Final = {
    f"{prefix}{unit}": Fraction(scale * bits)
    for prefix, scale in _PREFIXES.items()
    for unit, bits in (("bit/s", 1), ("bps", 1), ("B/s", 8))
}


def fail(key: str, expected: str, value: object) -> ConfigurationError:
    """Make the error that a value is not what its key takes."""
    shown = repr(value)
    if len(shown) > 80:
        shown = f"{shown[:77]}..."
    return ConfigurationError(f"{key}: expected {expected}, got {shown}")


def number(value: object, key: str, expected: str = "a number") -> float:
    """Read a plain number, which is not NaN."""
    if isinstance(value, bool) or not isinstance(value, Real):
        raise fail(key, expected, value)
    try:
        plain = float(value)
    except OverflowError:
        raise fail(key, expected, value) from None
    if math.isnan(plain):
        raise fail(key, expected, value)
    return plain


def duration(value: object, key: str) -> float:
    """Read a time in seconds, or with a unit.

    Examples
    --------
    >>> duration("20 ms", "latency"), duration(2, "latency")
    (0.02, 2.0)
    """
    expected = f"a time from 0 to {_MOST:g} seconds, such as 0.02 or '20 ms'"
    seconds = _quantity(value, key, _SECONDS, expected)
    if not 0 <= seconds <= _MOST:
        raise fail(key, expected, value)
    return seconds


def bandwidth(value: object, key: str) -> float:
    """Read bits per second, or with a unit; None or infinity is unlimited.

    Examples
    --------
    >>> bandwidth("60 Mbit/s", "uplink"), bandwidth("125 kB/s", "uplink")
    (60000000.0, 1000000.0)
    """
    if value is None:
        return math.inf
    expected = "at least 1 bit per second, such as 1e7, '10 Mbit/s' or '125 kB/s'"
    bits = _quantity(value, key, _BITS_PER_SECOND, expected)
    if bits < 1:
        raise fail(key, expected, value)
    return bits


def factor(value: object, key: str) -> float:
    """Read a factor of compute time."""
    expected = f"a factor above 0, at most {_MOST:g}"
    plain = number(value, key, expected)
    if not 0 < plain <= _MOST:
        raise fail(key, expected, value)
    return plain


def per_node(
    value: object,
    key: str,
    read: Reader,
    expected: str = "a list with one entry for each node",
) -> tuple[float, ...]:
    """Read one value for each node."""
    if not is_sequence(value) or not value:
        raise fail(key, expected, value)
    return tuple(read(entry, f"{key}[{node}]") for node, entry in enumerate(value))


def rows(value: object, key: str, read: Reader) -> tuple[tuple[float, ...], ...]:
    """Read a row of one or more values for each node."""
    if not is_sequence(value) or not value:
        raise fail(key, "a list with one row for each node", value)
    return tuple(
        per_node(row, f"{key}[{node}]", read, "a list of one or more entries")
        for node, row in enumerate(value)
    )


def index(value: object, key: str) -> int:
    """Read the index of a node."""
    if isinstance(value, bool) or not isinstance(value, Integral) or value < 0:
        raise fail(key, "the index of a node, counted from 0", value)
    return int(value)


def is_sequence(value: object) -> TypeGuard[Sequence[Any]]:
    """Tell whether a value is a list or the like, text excluded."""
    return isinstance(value, Sequence) and not isinstance(value, str | bytes)


def inline(value: object, key: str, folder: Path | None = None) -> object:
    """Put the content of a ``.json`` file in the place of its name, and lists in that of arrays."""
    if isinstance(value, Path) or (isinstance(value, str) and value.endswith(".json")):
        path = (folder or Path()) / value
        try:
            return json.loads(read_text(path, key))
        except ValueError as error:
            raise ConfigurationError(f"{key}: {path} is not valid JSON: {error}") from None
    to_list: Callable[[], object] | None = getattr(value, "tolist", None)
    return value if to_list is None else to_list()


def read_text(path: Path, key: str) -> str:
    """Read a file that an app brought along."""
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ConfigurationError(
            f"{key}: there is no file {path}. If it is part of the app, it was left out of the "
            "app bundle: Flower packs only "
            f"{' '.join(f'*{suffix}' for suffix in BUNDLED)}, and of these only what fab-include "
            "under [tool.flwr.app] names, where it is set"
        ) from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"{key}: cannot read {path}: {error}") from None


def _quantity(value: object, key: str, units: Mapping[str, Fraction], expected: str) -> float:
    if not isinstance(value, str):
        return number(value, key, expected)
    match = _QUANTITY.fullmatch(value)
    if match is None or match[2] not in units:
        raise fail(key, f"{expected} (units: {' '.join(units)})", value)
    try:
        # A fraction rounds once, so that "20 ms" is the same float as 0.02.
        return float(Fraction(match[1]) * units[match[2]])
    except OverflowError:
        raise fail(key, expected, value) from None
