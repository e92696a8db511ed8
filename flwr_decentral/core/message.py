"""What one node sends another.

A message is a kind, a step, a few named numbers and at most one vector. It is immutable, and so is
its payload: in one process all receivers share the same buffer. On a real link the channel writes
the same fields into a frame; nothing is ever pickled.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

from .wire import Wire, wire_bytes

Vector: TypeAlias = NDArray[np.float32]
"""A flat model or a part of one: float32, one-dimensional, C-contiguous."""

HEADER_BYTES: Final = 64
"""What a message costs on the wire besides its payload: version, algorithm, addresses, step."""

_NO_HEADER: Final[Mapping[str, int | float]] = MappingProxyType({})


def message_bytes(length: int, wire: Wire = "float32") -> int:
    """Count the bytes of a message with so many values on the wire, header included."""
    return HEADER_BYTES + wire_bytes(length, wire)


def _no_header() -> Mapping[str, int | float]:
    return _NO_HEADER


@dataclass(frozen=True, kw_only=True, slots=True)
class Message:
    """Carry one vector, or none, from one node to another.

    Attributes
    ----------
    kind : str
        What it is, in the algorithm's own words (``"model"``, ``"fragment"``).
    step : int
        The sender's step or round. It never decreases; what is sent again keeps its step.
    payload : ndarray of float32, shape (any,), optional
        Read-only.
    header : mapping of str to int or float
        At most five numbers that the receiver needs (``{"fragment": 3}``); they count as part of
        the :data:`HEADER_BYTES`.
    wire : {"float32", "bfloat16", "float16", "int8"}
        The form in which the payload travels. Its values have been rounded to that form already,
        by :meth:`~flwr_decentral.core.algorithm.Machine.on_wire`.
    """

    kind: str
    step: int
    payload: Vector | None = None
    header: Mapping[str, int | float] = field(default_factory=_no_header)
    wire: Wire = "float32"

    @property
    def nbytes(self) -> int:
        """Bytes on the wire, header included."""
        return message_bytes(0 if self.payload is None else len(self.payload), self.wire)
