"""Errors that say whose fault it is and what to do next.

Every error of the project names one of four parties at fault, so that a user knows where to look:

=====================  ==========================================================================
configuration          the user's settings, topology, scenario or app; raised before any training
algorithm              a machine broke the contract of :mod:`flwr_decentral.core.algorithm`
peer                   another node sent what it must not; the offender is named, the run goes on
runtime                the machine we run on: memory, processes, sockets, deadlines
=====================  ==========================================================================
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import ClassVar, Literal

Fault = Literal["configuration", "algorithm", "peer", "runtime"]


class DecentralError(Exception):
    """Report a problem together with the party at fault.

    Attributes
    ----------
    fault : {"configuration", "algorithm", "peer", "runtime"}
        Whose fault it is.
    """

    fault: ClassVar[Fault] = "runtime"

    def __str__(self) -> str:
        return f"[{self.fault}] {super().__str__()}"


class ConfigurationError(DecentralError, ValueError):
    """Refuse a setting, before any training has started."""

    fault: ClassVar[Fault] = "configuration"


class AlgorithmError(DecentralError):
    """Report an algorithm that broke its contract with the runtime."""

    fault: ClassVar[Fault] = "algorithm"


class PeerError(DecentralError, ValueError):
    """Refuse what another node sent."""

    fault: ClassVar[Fault] = "peer"


class RuntimeFault(DecentralError, RuntimeError):
    """Report a failure of the processes, memory or sockets a run stands on."""

    fault: ClassVar[Fault] = "runtime"


def error_of(fault: object, reason: object) -> DecentralError:
    """Make the error that another process has reported by its party at fault and its text.

    Examples
    --------
    >>> error_of("peer", "it sent a NaN")
    PeerError('it sent a NaN')
    >>> error_of("nobody we know", "something broke")
    RuntimeFault('something broke')
    """
    kinds = (ConfigurationError, AlgorithmError, PeerError)
    kind = next((kind for kind in kinds if kind.fault == fault), RuntimeFault)
    return kind(str(reason))


def suggest(name: str, known: Iterable[str]) -> str:
    """Say which known name is nearest to ``name``, and which names there are.

    Parameters
    ----------
    name : str
        The unknown name.
    known : iterable of str
        The names that would have been accepted.

    Returns
    -------
    str
        A clause to end an error message with.

    Examples
    --------
    >>> suggest("rign", ["ring", "star"])
    "did you mean 'ring'? known: ring, star"
    >>> suggest("zzz", ["ring", "star"])
    'known: ring, star'
    >>> suggest("ring", [])
    'known: none'
    """
    names = sorted(known)
    near = difflib.get_close_matches(name, names, n=1)
    listing = f"known: {', '.join(names) if names else 'none'}"
    return f"did you mean {near[0]!r}? {listing}" if near else listing
