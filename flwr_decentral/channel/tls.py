"""Who may speak: mutual TLS 1.3, and the fingerprint of the roster on top of it.

Both ends ask for the other's certificate, verify its chain against the configured CA and its dates,
and then compare its SHA-256 fingerprint with the roster. Either check alone is not enough: the
chain does not tell one node from another, and the fingerprint does not expire. Host names are not
compared, since the roster says which *node* is meant. Sessions are not resumed, so that each
connection proves itself. Without certificates nothing runs, unless ``insecure = true`` says so in
words, or all peers are on this machine and meet over Unix sockets.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import ssl
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from flwr_decentral.core import ConfigurationError

from .refusals import Reason, Refusal

_LOGGER: Final = logging.getLogger(__name__)

# X509_V_ERR_... of OpenSSL
_VERDICTS: Final = {
    9: Reason.NOT_YET_VALID,
    10: Reason.EXPIRED,
    2: Reason.OTHER_CA,
    7: Reason.OTHER_CA,
    18: Reason.OTHER_CA,
    19: Reason.OTHER_CA,
    20: Reason.OTHER_CA,
    21: Reason.OTHER_CA,
}

# What OpenSSL calls the alerts that the other end sends, and what it says of bytes that are no TLS.
_ALERTS: Final = {
    "SSLV3_ALERT_CERTIFICATE_EXPIRED": Reason.EXPIRED,
    "TLSV1_ALERT_UNKNOWN_CA": Reason.OTHER_CA,
    "TLSV13_ALERT_CERTIFICATE_REQUIRED": Reason.NO_CERTIFICATE,
    "SSLV3_ALERT_BAD_CERTIFICATE": Reason.BAD_CERTIFICATE,
    "SSLV3_ALERT_UNSUPPORTED_CERTIFICATE": Reason.BAD_CERTIFICATE,
    "SSLV3_ALERT_CERTIFICATE_UNKNOWN": Reason.BAD_CERTIFICATE,
}
_NO_TLS: Final = {
    "WRONG_VERSION_NUMBER",
    "HTTP_REQUEST",
    "HTTPS_PROXY_REQUEST",
    "UNEXPECTED_MESSAGE",
    "RECORD_LAYER_FAILURE",
    "BAD_RECORD_TYPE",
    "PACKET_LENGTH_TOO_LONG",
    "UNKNOWN_PROTOCOL",
    "INVALID_RECORD_TYPE",
}


@dataclass(frozen=True, kw_only=True)
class Security:
    """Where this node's certificate, its key and the CA of all nodes are.

    Attributes
    ----------
    ca, cert, key : path or None
        PEM files: the CA certificates, this node's certificate, and its private key.
    insecure : bool (default: False)
        Speak plaintext: anyone who reaches the port can pass for any node and read every model.
    local : bool (default: False)
        Speak over Unix sockets only, to processes of the same user, as the kernel vouches.
    """

    ca: Path | None = None
    cert: Path | None = None
    key: Path | None = None
    insecure: bool = False
    local: bool = False

    def __post_init__(self) -> None:
        """Refuse what is neither one nor the other."""
        given = [name for name in ("ca", "cert", "key") if getattr(self, name) is not None]
        if self.insecure and given:
            raise ConfigurationError(
                f"insecure = true, but {', '.join(given)} are given: choose one of the two"
            )
        if self.local and (self.insecure or given):
            raise ConfigurationError(
                "peers on Unix sockets need neither certificates nor insecure = true: leave out "
                f"{', '.join(given) or 'insecure'}"
            )
        if not self.insecure and not self.local and len(given) < 3:
            raise ConfigurationError(
                "peers need certificates: set peer-ca, peer-cert and peer-key in the node config "
                "(flwr-decentral keys makes them for a trial), or write insecure = true"
                + (f"; only {', '.join(given)} is set" if given else "")
            )

    def load(self) -> Contexts | None:
        """Read the files; None where all is to be plaintext, and a warning where that is a risk.

        Raises
        ------
        ConfigurationError
            If a file cannot be read, key and certificate are not of one pair, or this node's
            certificate would be refused by its peers: it has expired, or another CA signed it.
        """
        if self.local:
            return None
        if self.insecure:
            _LOGGER.warning(
                "insecure = true: models travel in plaintext, and anyone who reaches this port can "
                "pass for any node. Use it on one machine or for tests only"
            )
            return None
        assert self.ca is not None
        assert self.cert is not None
        assert self.key is not None
        contexts = Contexts(
            server=self._context(ssl.PROTOCOL_TLS_SERVER, self.ca, self.cert, self.key),
            client=self._context(ssl.PROTOCOL_TLS_CLIENT, self.ca, self.cert, self.key),
        )
        try:
            certificate = _meet_oneself(contexts)
        except ssl.SSLError as error:
            why = getattr(error, "verify_message", "") or error.reason or str(error)
            raise ConfigurationError(
                f"peers would refuse this node's certificate {self.cert} against {self.ca}: {why}"
            ) from error
        return Contexts(contexts.server, contexts.client, fingerprint(certificate))

    @staticmethod
    def _context(protocol: int, ca: Path, cert: Path, key: Path) -> ssl.SSLContext:
        context = ssl.SSLContext(protocol)
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.check_hostname = False
        context.verify_mode = ssl.CERT_REQUIRED
        context.options |= ssl.OP_NO_TICKET
        if protocol == ssl.PROTOCOL_TLS_SERVER:
            context.num_tickets = 0
        try:
            context.load_verify_locations(ca)
        except OSError as error:
            raise ConfigurationError(f"cannot read peer-ca {ca}: {error}") from error
        try:
            context.load_cert_chain(cert, key, password=_refuse_password)
        except OSError as error:
            raise ConfigurationError(
                f"cannot use peer-cert {cert} with peer-key {key}: {error}"
            ) from error
        return context


@dataclass(frozen=True)
class Contexts:
    """What a node speaks TLS with, at either end of a connection.

    Attributes
    ----------
    server, client : ssl.SSLContext
        For connections that it accepts, and that it dials.
    fingerprint : str
        Of its own certificate.
    """

    server: ssl.SSLContext
    client: ssl.SSLContext
    fingerprint: str = ""


def fingerprint(certificate: bytes) -> str:
    """Hash a certificate in DER form: SHA-256, 64 hexadecimal digits."""
    return hashlib.sha256(certificate).hexdigest()


def explain(error: OSError) -> Refusal:
    """Say what a failed handshake means, and which end refused the other."""
    if isinstance(error, ssl.SSLCertVerificationError):
        reason = _VERDICTS.get(error.verify_code, Reason.BAD_CERTIFICATE)
        return Refusal(reason, f"its certificate does not hold: {error.verify_message}")
    name = getattr(error, "reason", None) or ""
    if name in _ALERTS:
        return Refusal(f"peer:{_ALERTS[name]}", "it refuses this node's certificate")
    if "ALERT" in name:
        return Refusal(f"peer:{Reason.TLS_FAILED}", f"it ends the handshake: {name}")
    if name == "PEER_DID_NOT_RETURN_A_CERTIFICATE":
        return Refusal(Reason.NO_CERTIFICATE, "it shows no certificate")
    if name in _NO_TLS:
        return Refusal(
            Reason.NOT_TLS,
            "it does not speak TLS; a node with insecure = true, or a stranger on the port",
        )
    if isinstance(error, ssl.SSLEOFError | ConnectionError):
        return Refusal(f"peer:{Reason.CLOSED}", "it closed the connection in the handshake")
    return Refusal(Reason.TLS_FAILED, f"no TLS with it: {name or error}")


def _refuse_password() -> str:
    raise ConfigurationError(
        "peer-key is encrypted: a sidecar that starts by itself has nobody to ask for a password; "
        "keep the key unencrypted in a file that only its user can read"
    )


def _meet_oneself(contexts: Contexts) -> bytes:
    """Shake hands with oneself, by the rules of the peers; return one's certificate in DER form."""
    there, back = ssl.MemoryBIO(), ssl.MemoryBIO()
    client = contexts.client.wrap_bio(back, there)
    server = contexts.server.wrap_bio(there, back, server_side=True)
    waiting = [client, server]
    while waiting:
        for end in list(waiting):
            with contextlib.suppress(ssl.SSLWantReadError):
                end.do_handshake()
                waiting.remove(end)
    certificate = client.getpeercert(binary_form=True)
    assert certificate is not None
    return certificate
