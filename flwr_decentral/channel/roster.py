"""Who takes part in a run, where each node listens, and by which certificate it is known.

The rule of the edges: of the two ends of an edge the one with the lower index dials, if the other
is reachable; else the other does; if neither is reachable, there can be no such edge.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final, NamedTuple

from flwr_decentral.core import ConfigurationError, suggest

_FINGERPRINT: Final = re.compile(r"[0-9a-f]{64}")
_KEYS: Final = ("index", "address", "fingerprint")


_LOCAL: Final = "unix:"


class Address(NamedTuple):
    """A host, by name or number, and a TCP port; or a Unix socket, whose port is 0."""

    host: str
    port: int

    @classmethod
    def parse(cls, text: str) -> Address:
        """Read ``host:port``, where an IPv6 host stands in brackets, or ``unix:`` and a socket.

        A Unix socket is a path, or a name after ``@`` in Linux's abstract namespace.

        Raises
        ------
        ConfigurationError
            If it is not that.

        Examples
        --------
        >>> Address.parse("[::1]:48200")
        Address(host='::1', port=48200)
        >>> Address.parse("unix:@node-3").path
        '@node-3'
        """
        if text.startswith(_LOCAL) and len(text) > len(_LOCAL):
            return cls(text, 0)
        host, colon, port = text.strip().rpartition(":")
        bracketed = host.startswith("[") and host.endswith("]")
        host = host[1:-1] if bracketed else host
        fits = port.isascii() and port.isdigit() and int(port) < 2**16
        if not colon or not host or not fits or (":" in host and not bracketed):
            raise ConfigurationError(
                f"{text!r} is no address: write host:port, such as 10.0.0.7:48200 or [::1]:48200"
            )
        return cls(host, int(port))

    @property
    def is_local(self) -> bool:
        """Whether this is a Unix socket, which only processes of this machine reach."""
        return self.host.startswith(_LOCAL)

    @property
    def path(self) -> str:
        """The Unix socket."""
        return self.host.removeprefix(_LOCAL)

    def __str__(self) -> str:
        if self.is_local:
            return self.host
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def normal_fingerprint(text: str) -> str:
    """Bring the SHA-256 fingerprint of a certificate into one form: 64 lower-case digits.

    Raises
    ------
    ConfigurationError
        If it is none.

    Examples
    --------
    >>> normal_fingerprint("AB:" * 31 + "AB")[:8]
    'abababab'
    """
    digits = text.strip().lower().removeprefix("sha256:").replace(":", "")
    if not _FINGERPRINT.fullmatch(digits):
        raise ConfigurationError(
            f"{text!r} is no SHA-256 fingerprint: 64 hexadecimal digits, as printed by "
            "flwr-decentral keys or openssl x509 -noout -fingerprint -sha256"
        )
    return digits


@dataclass(frozen=True, kw_only=True)
class Member:
    """One node of the roster.

    Attributes
    ----------
    index : int
        Its node index.
    address : Address or None
        Where it can be dialed; None if it cannot, and only dials.
    fingerprint : str
        SHA-256 of its certificate, 64 hexadecimal digits; empty where all is plaintext.
    """

    index: int
    address: Address | None = None
    fingerprint: str = ""


@dataclass(frozen=True)
class Roster:
    """All nodes of a run and the edges between them. Make one with :meth:`of`.

    Attributes
    ----------
    members : tuple of Member
        By their index.
    edges : frozenset of (int, int)
        Each with its lower index first.
    """

    members: tuple[Member, ...]
    edges: frozenset[tuple[int, int]]

    @classmethod
    def of(cls, members: Iterable[Member], edges: Iterable[tuple[int, int]]) -> Roster:
        """Check a roster.

        Parameters
        ----------
        members : iterable of Member
            In any order.
        edges : iterable of (int, int)
            Of the topology; each counts in both directions.

        Raises
        ------
        ConfigurationError
            If indices are missing or claimed twice, a fingerprint or an address is claimed twice,
            some have a fingerprint and some have not, an edge has an end that is not there, or
            neither of its ends can be dialed. It names those at fault.
        """
        ordered = sorted(members, key=lambda member: member.index)
        indices = [member.index for member in ordered]
        twice = [index for index, count in Counter(indices).items() if count > 1]
        if twice:
            raise ConfigurationError(
                "; ".join(_claims(f"node {i}", [m for m in ordered if m.index == i]) for i in twice)
                + ": give each SuperNode a partition-id of its own"
            )
        if indices != list(range(len(indices))):
            missing = sorted(set(range(max(indices) + 1)) - set(indices))
            strange = [index for index in indices if index < 0]
            raise ConfigurationError(
                f"the roster has nodes {indices}; they must be 0 to n-1"
                f"{f', but {missing} are missing' if missing else ''}"
                f"{f', and {strange} cannot be' if strange else ''}"
            )
        _check_claims(ordered)
        normal = frozenset((min(edge), max(edge)) for edge in edges)
        for a, b in sorted(normal):
            if a == b or b >= len(ordered) or a < 0:
                raise ConfigurationError(
                    f"the topology has an edge {a}-{b}, but the roster only nodes "
                    f"0 to {len(ordered) - 1}"
                )
            if ordered[a].address is None and ordered[b].address is None:
                raise ConfigurationError(
                    f"nodes {a} and {b} are neighbors, but neither can be dialed: give one of them "
                    "a peer-address in its node config, or take another topology"
                )
        return cls(tuple(ordered), normal)

    @classmethod
    def from_records(
        cls, records: Sequence[Mapping[str, Any]], edges: Iterable[tuple[int, int]]
    ) -> Roster:
        """Read a roster from plain values, as :meth:`records` makes them.

        Raises
        ------
        ConfigurationError
            If a record cannot be read, or for what :meth:`of` refuses.
        """
        return cls.of(map(_member, records), edges)

    def records(self) -> list[dict[str, int | str]]:
        """Write the members as plain values, to be sent."""
        return [
            {
                "index": member.index,
                "address": str(member.address or ""),
                "fingerprint": member.fingerprint,
            }
            for member in self.members
        ]

    def neighbors(self, index: int) -> tuple[int, ...]:
        """List the neighbors of a node, ascending."""
        ends = (edge for edge in self.edges if index in edge)
        return tuple(sorted(a + b - index for a, b in ends))

    def dialer(self, a: int, b: int) -> int:
        """Tell which of two neighbors dials."""
        lower, higher = min(a, b), max(a, b)
        return lower if self.members[higher].address is not None else higher

    def index_of(self, fingerprint: str) -> int | None:
        """Tell whose certificate that is; None if it is nobody's."""
        return self._known.get(fingerprint)

    @cached_property
    def _known(self) -> dict[str, int]:
        return {member.fingerprint: member.index for member in self.members if member.fingerprint}


def _member(record: Mapping[str, Any]) -> Member:
    for key in record:
        if key not in _KEYS:
            raise ConfigurationError(f"a roster has no {key!r}; {suggest(key, _KEYS)}")
    index, address, fingerprint = (record.get(key, "") for key in _KEYS)
    if type(index) is not int or not isinstance(address, str) or not isinstance(fingerprint, str):
        raise ConfigurationError(f"this is no node of a roster: {dict(record)}")
    return Member(
        index=index,
        address=Address.parse(address) if address else None,
        fingerprint=normal_fingerprint(fingerprint) if fingerprint else "",
    )


def _check_claims(members: Sequence[Member]) -> None:
    """Refuse what two nodes claim, and certificates of some nodes only."""
    for what in ("fingerprint", "address"):
        holders: dict[object, int] = {}
        for member in members:
            value = getattr(member, what)
            if value and holders.setdefault(value, member.index) != member.index:
                raise ConfigurationError(
                    f"nodes {holders[value]} and {member.index} both claim {what} {value}; each "
                    "node needs its own"
                )
    unset = [
        member.index
        for member in members
        if member.address and not member.address.is_local and not member.address.port
    ]
    if unset:
        raise ConfigurationError(f"nodes {unset} have an address with port 0: name the real port")
    bare = [member.index for member in members if not member.fingerprint]
    if bare and len(bare) < len(members):
        raise ConfigurationError(
            f"nodes {bare} have no certificate fingerprint, the others have one: give every node a "
            "certificate, or none with insecure = true"
        )


def _claims(what: str, members: Sequence[Member]) -> str:
    places = " and ".join(
        f"the one at {member.address}" if member.address else f"one of {member.fingerprint[:16]}…"
        for member in members
    )
    return f"{what} is claimed by {places}"
