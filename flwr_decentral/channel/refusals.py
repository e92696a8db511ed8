"""Why a peer is refused, how often it was, and one line of log for each peer and reason.

A refusal is nobody's failure but the peer's: the run goes on without it, and whoever looks at the
counters sees what is wrong. A reason that begins with ``peer:`` is the other end's: it refused us.
"""

from __future__ import annotations

import logging
from collections import Counter
from enum import StrEnum
from typing import Final

from flwr_decentral.core import PeerError

_LOGGER: Final = logging.getLogger(__name__)
_MOST_LOGGED: Final = 256
"""How many different lines are logged: whoever can reach the port must not fill a disk."""


class Reason(StrEnum):
    """Why a connection or a peer is refused."""

    # the certificate
    EXPIRED = "certificate-expired"
    NOT_YET_VALID = "certificate-not-yet-valid"
    OTHER_CA = "certificate-of-another-ca"
    BAD_CERTIFICATE = "certificate-unfit"
    NO_CERTIFICATE = "no-certificate"
    WRONG_INDEX = "certificate-of-another-index"
    NOT_IN_ROSTER = "not-in-roster"
    NOT_A_NEIGHBOR = "not-a-neighbor"
    # what is spoken
    NOT_TLS = "plaintext-against-tls"
    TLS = "tls-against-plaintext"
    TLS_FAILED = "tls-failed"
    GARBAGE = "not-our-protocol"
    FRAME = "bad-frame"
    CHECKSUM = "bad-checksum"
    MEMORY = "no-memory-for-payload"
    # the HELLO
    PROTOCOL = "other-protocol-version"
    RUN = "other-run"
    EPOCH = "other-epoch"
    INDEX = "other-index"
    ALGORITHM = "other-algorithm"
    ALGORITHM_VERSION = "other-algorithm-version"
    LAYOUT = "other-layout"
    STALE = "older-incarnation"
    DUPLICATE = "second-connection"
    # time and space
    TIMEOUT = "handshake-timeout"
    CROWD = "too-many-handshakes"
    CLOSED = "closed-in-handshake"
    NO_ROOM = "cannot-accept"
    # on a Unix socket
    STRANGER = "another-user"


class Refusal(PeerError):
    """Refuse a peer, for a reason that is counted.

    Attributes
    ----------
    reason : Reason or str
        Why; a string is what the other end called it.
    """

    def __init__(self, reason: Reason | str, detail: str) -> None:
        super().__init__(detail)
        self.reason = reason

    @property
    def detail(self) -> str:
        """What is wrong, without the party at fault."""
        return str(self.args[0])


class Refusals:
    """Count refusals by reason, and log each peer's first one of a reason.

    Attributes
    ----------
    counts : Counter of str
        How often each reason came up.
    """

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self._logged: set[tuple[str, str]] = set()

    def note(self, who: str, refusal: Refusal) -> None:
        """Count a refusal of ``who``: a node, or an address that has not said who it is."""
        reason = str(refusal.reason)
        self.counts[reason] += 1
        if (who, reason) in self._logged or len(self._logged) >= _MOST_LOGGED:
            return
        self._logged.add((who, reason))
        _LOGGER.warning(
            "%s refused (%s): %s. Logged once; the counters go on", who, reason, refusal.detail
        )
