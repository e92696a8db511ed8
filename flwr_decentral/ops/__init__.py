"""Vector arithmetic: the numpy reference, and whatever backend is installed beside it.

``FLWR_DECENTRAL_OPS`` names the backend to use, ``reference`` by default; a backend registers under
the entry-point group ``flwr_decentral.ops_backends``. All backends give the same bits.
"""

from __future__ import annotations

import os
from importlib.metadata import entry_points
from typing import Final, cast

from flwr_decentral.core.errors import ConfigurationError, suggest

from .contract import Ops, Piece
from .reference import Reference

GROUP: Final = "flwr_decentral.ops_backends"
VARIABLE: Final = "FLWR_DECENTRAL_OPS"

__all__ = ["GROUP", "VARIABLE", "Ops", "Piece", "Reference", "available", "choose"]


def available() -> dict[str, str]:
    """Name every backend that is installed, and where it comes from."""
    found = {Reference.name: f"{Reference.__module__}:{Reference.__qualname__}"}
    found.update({point.name: point.value for point in entry_points(group=GROUP)})
    return found


def choose(name: str | None = None) -> Ops:
    """Load a backend.

    Parameters
    ----------
    name : str, optional
        Its name; by default what ``FLWR_DECENTRAL_OPS`` says, or ``reference``.

    Raises
    ------
    ConfigurationError
        If no backend of that name is installed.
    """
    name = name or os.environ.get(VARIABLE) or Reference.name
    if name == Reference.name:
        return Reference()
    for point in entry_points(group=GROUP):
        if point.name == name:
            return cast(Ops, point.load()())
    raise ConfigurationError(
        f"ops backend {name!r} (from {VARIABLE} or the call) is not installed; "
        f"{suggest(name, available())}"
    )
