"""How precisely a payload is written on the wire.

What a machine sends is always a vector of float32, which its receivers see to the bit. A message
may say that its values were rounded to a shorter form; then only that form travels. Rounding twice
changes nothing, so the sender and the receiver hold the same vector.

=========  =====================================================================================
float32    4 bytes a value: nothing is rounded
bfloat16   2 bytes: float32's range, 8 significant bits, to the nearest, ties to even
float16    2 bytes: IEEE half precision, 11 significant bits; from 65,520 on it is infinite
int8       1 byte, and 4 bytes for each block of 256 values: see :mod:`flwr_decentral.ops.codecs`
=========  =====================================================================================
"""

from __future__ import annotations

from typing import Final, Literal, TypeAlias, get_args

from .errors import ConfigurationError, suggest

Wire: TypeAlias = Literal["float32", "bfloat16", "float16", "int8"]

WIRES: Final[tuple[Wire, ...]] = get_args(Wire)
_SCALAR: Final = {"float32": 4, "bfloat16": 2, "float16": 2}
BLOCK: Final = 256
"""Values that share a scale in the int8 form."""


def wire_bytes(length: int, wire: Wire) -> int:
    """Count the bytes of ``length`` values on the wire.

    Raises
    ------
    ConfigurationError
        If there is no such form.

    Examples
    --------
    >>> [wire_bytes(1000, wire) for wire in WIRES]
    [4000, 2000, 2000, 1016]
    """
    if wire == "int8":
        return length + 4 * -(-length // BLOCK)
    try:
        return length * _SCALAR[wire]
    except KeyError:
        check_wire(wire)
        raise


def check_wire(wire: str) -> None:
    """Refuse what is no form of payload.

    Raises
    ------
    ConfigurationError
        If it is none of :data:`WIRES`.
    """
    if wire not in WIRES:
        raise ConfigurationError(f"there is no wire {wire!r}; {suggest(wire, WIRES)}")
