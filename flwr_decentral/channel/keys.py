"""Certificates for a trial: a private CA and one certificate for each node.

What Flower itself needs for a trial deployment, TLS of a SuperLink and keys of SuperNodes, is made
here too.

For more than a trial use the CA that your organization has: a node needs nothing from here but
three PEM files. The CA's key can sign more nodes; whoever has it can admit anyone to the CA, but
not to a run, whose roster names each certificate.
"""

from __future__ import annotations

import ipaddress
import os
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Final

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from flwr_decentral.core import ConfigurationError

from .tls import fingerprint

CA_CERT: Final = "ca.pem"
CA_KEY: Final = "ca.key"
CERT: Final = "cert.pem"
KEY: Final = "key.pem"

_SLACK: Final = timedelta(hours=1)
"""Certificates begin to hold a little before they are made: clocks differ."""


@dataclass(frozen=True)
class Authority:
    """A CA that can sign certificates of nodes."""

    certificate: x509.Certificate
    key: ec.EllipticCurvePrivateKey

    @classmethod
    def make(
        cls, name: str, *, begin: datetime | None = None, end: datetime | None = None
    ) -> Authority:
        """Make a CA; by default it holds from now on for a year."""
        key = ec.generate_private_key(ec.SECP256R1())
        builder = _builder(name, name, key.public_key(), begin, end)
        extensions: tuple[tuple[x509.ExtensionType, bool], ...] = (
            (x509.BasicConstraints(ca=True, path_length=0), True),
            (_usage(signs_certificates=True), True),
            (x509.SubjectKeyIdentifier.from_public_key(key.public_key()), False),
        )
        for extension, critical in extensions:
            builder = builder.add_extension(extension, critical)
        return cls(builder.sign(key, hashes.SHA256()), key)

    def issue(
        self,
        name: str,
        *,
        begin: datetime | None = None,
        end: datetime | None = None,
        addresses: Iterable[str] = (),
    ) -> tuple[x509.Certificate, ec.EllipticCurvePrivateKey]:
        """Make the certificate and the key of a node, for both ends of a connection.

        ``addresses`` are IP addresses that it names, for clients that compare them.
        """
        key = ec.generate_private_key(ec.SECP256R1())
        issuer = self.certificate.subject.get_attributes_for_oid(NameOID.COMMON_NAME)[0].value
        builder = _builder(name, str(issuer), key.public_key(), begin, end)
        both = [ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]
        extensions: tuple[tuple[x509.ExtensionType, bool], ...] = (
            (x509.BasicConstraints(ca=False, path_length=None), True),
            (_usage(signs_certificates=False), True),
            (x509.ExtendedKeyUsage(both), False),
            (x509.SubjectKeyIdentifier.from_public_key(key.public_key()), False),
            (x509.AuthorityKeyIdentifier.from_issuer_public_key(self.key.public_key()), False),
        )
        for extension, critical in extensions:
            builder = builder.add_extension(extension, critical)
        if names := [x509.IPAddress(ipaddress.ip_address(address)) for address in addresses]:
            builder = builder.add_extension(x509.SubjectAlternativeName(names), critical=False)
        return builder.sign(self.key, hashes.SHA256()), key


def make_keys(folder: Path, nodes: int, days: int) -> list[str]:
    """Write a CA and the certificates of nodes 0 to n-1: one folder for each, ready to be copied.

    Parameters
    ----------
    folder : path
        Where; it must not exist, or be empty.
    nodes : int
        How many nodes, n.
    days : int
        How long the certificates hold.

    Returns
    -------
    list of str, length nodes
        The fingerprint of each node's certificate.

    Raises
    ------
    ConfigurationError
        If that is not possible, or would overwrite something. Nothing has been written then.
    """
    if nodes < 1 or days < 1:
        raise ConfigurationError(f"cannot make {nodes} certificates that hold {days} days")
    try:
        taken = folder.exists() and any(folder.iterdir())
    except OSError as error:
        raise ConfigurationError(f"cannot use {folder}: {error.strerror}") from error
    if taken:
        raise ConfigurationError(
            f"{folder} is not empty, and nothing is overwritten: name another folder, or remove it "
            "if no node uses these keys any more"
        )
    end = datetime.now(UTC) + timedelta(days=days)
    authority = Authority.make("flwr-decentral trial CA", end=end)
    prints = []
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        ca = _pem(authority.certificate)
        _write(folder / CA_CERT, ca)
        _write(folder / CA_KEY, _pem(authority.key))
        for node in range(nodes):
            home = node_folder(folder, node)
            home.mkdir(mode=0o700)
            certificate, key = authority.issue(f"node {node}", end=end)
            _write(home / CA_CERT, ca)
            _write(home / CERT, _pem(certificate))
            _write(home / KEY, _pem(key))
            prints.append(fingerprint(certificate.public_bytes(serialization.Encoding.DER)))
    except OSError as error:
        raise ConfigurationError(
            f"cannot write {error.filename or folder}: {error.strerror}"
        ) from error
    return prints


def make_superlink_keys(folder: Path, address: str, supernodes: int, days: int) -> None:
    """Write what a SuperLink and its SuperNodes need for TLS and node authentication, for a trial.

    That is ``ca.pem``, ``cert.pem`` and ``key.pem`` of the SuperLink, and for each SuperNode its
    private key ``supernode-0`` and so on, with the public one beside it, ``supernode-0.pub``.

    Parameters
    ----------
    folder : path
        Where; it must not exist.
    address : str
        The IP address at which the SuperLink is reached.
    supernodes : int
        How many SuperNodes.
    days : int
        How long the certificate holds.
    """
    end = datetime.now(UTC) + timedelta(days=days)
    authority = Authority.make("flwr-decentral trial SuperLink CA", end=end)
    certificate, key = authority.issue("SuperLink", end=end, addresses=[address])
    folder.mkdir(mode=0o700)
    _write(folder / CA_CERT, _pem(authority.certificate))
    _write(folder / CERT, _pem(certificate))
    _write(folder / KEY, _pem(key))
    formats = serialization.PrivateFormat.OpenSSH, serialization.PublicFormat.OpenSSH
    for node in range(supernodes):
        own = ec.generate_private_key(ec.SECP384R1())
        private = own.private_bytes(
            serialization.Encoding.PEM, formats[0], serialization.NoEncryption()
        )
        public = own.public_key().public_bytes(serialization.Encoding.OpenSSH, formats[1])
        _write(folder / f"supernode-{node}", private)
        _write(folder / f"supernode-{node}.pub", public)


def node_folder(folder: Path, node: int) -> Path:
    """Say where the files of a node are."""
    return folder / f"node-{node}"


def _builder(
    name: str,
    issuer: str,
    public: ec.EllipticCurvePublicKey,
    begin: datetime | None,
    end: datetime | None,
) -> x509.CertificateBuilder:
    now = datetime.now(UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)]))
        .issuer_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, issuer)]))
        .public_key(public)
        .serial_number(x509.random_serial_number())
        .not_valid_before(begin or now - _SLACK)
        .not_valid_after(end or now + timedelta(days=365))
    )


def _usage(*, signs_certificates: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=True,
        key_cert_sign=signs_certificates,
        crl_sign=signs_certificates,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )


def _pem(thing: x509.Certificate | ec.EllipticCurvePrivateKey) -> bytes:
    if isinstance(thing, x509.Certificate):
        return thing.public_bytes(serialization.Encoding.PEM)
    return thing.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    )


def _write(path: Path, content: bytes) -> None:
    """Write a file that is new, and that nobody else may read at any time."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(content)
