"""State that can be written down, and taken up again from what was written.

A machine names its changing attributes in ``STATE``; so does a :class:`Part`, which is state with
behavior of its own, such as one side of a protocol. What they hold is numbers, strings, arrays,
tuples, lists, dicts and sets of these, generators, and further parts: nothing that needs pickle.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, ClassVar

import numpy as np

from .errors import AlgorithmError


class Part:
    """A part of a machine's state, with its changing attributes listed in ``STATE``."""

    STATE: ClassVar[tuple[str, ...]] = ()

    def snapshot(self) -> dict[str, Any]:
        """Copy the whole state, as plain values and arrays."""
        return write_down(self, self.STATE)

    def restore(self, snapshot: Mapping[str, Any]) -> None:
        """Become what :meth:`snapshot` has described."""
        take_up(self, self.STATE, snapshot)


def write_down(owner: object, names: Iterable[str]) -> dict[str, Any]:
    """Copy the named attributes deeply; a generator becomes its state."""
    return {name: _copy(getattr(owner, name)) for name in names}


def take_up(owner: object, names: Iterable[str], snapshot: Mapping[str, Any]) -> None:
    """Set the named attributes to copies of what :func:`write_down` has made of them.

    Raises
    ------
    AlgorithmError
        If the snapshot is not of exactly these names.
    """
    expected = set(names)
    if set(snapshot) != expected:
        raise AlgorithmError(
            f"{type(owner).__name__} cannot restore a snapshot of {sorted(snapshot)}; "
            f"its state is {sorted(expected)}"
        )
    for name, value in snapshot.items():
        current = getattr(owner, name, None)
        if isinstance(current, np.random.Generator):
            current.bit_generator.state = _copy(value)
        elif isinstance(current, Part):
            current.restore(value)
        else:
            setattr(owner, name, _copy(value))


def _copy(value: Any) -> Any:
    if isinstance(value, np.random.Generator):
        return _copy(value.bit_generator.state)
    if isinstance(value, Part):
        return value.snapshot()
    if isinstance(value, np.ndarray):
        copy = value.copy()
        copy.flags.writeable = value.flags.writeable
        return copy
    if isinstance(value, dict):
        return {key: _copy(item) for key, item in value.items()}
    for kind in (list, tuple, set, frozenset):
        if isinstance(value, kind):
            return kind(_copy(item) for item in value)
    return value
