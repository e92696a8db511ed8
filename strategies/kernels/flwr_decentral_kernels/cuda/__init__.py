"""The ops backend ``cuda``: vector arithmetic on an NVIDIA GPU, with the bits of the reference."""

from __future__ import annotations

from flwr_decentral.core.errors import DecentralError

from .backend import Cuda
from .errors import DeviceMismatch, KernelError

__all__ = ["Cuda", "DeviceMismatch", "KernelError", "describe"]


def describe() -> tuple[str, str]:
    """Say which GPU the backend would use, or why it cannot.

    Returns
    -------
    tuple of (str, str)
        What there is, or what is missing; and what to do about it, empty if nothing.
    """
    try:
        return Cuda().describe(), ""
    except DecentralError as error:
        problem, _, remedy = str(error.args[0]).partition(". ")
        return problem, remedy
