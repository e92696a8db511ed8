"""Security: what is refused before anything is opened, and what a failed handshake means."""

import ssl

import pytest
from cryptography.hazmat.primitives import serialization

from flwr_decentral.channel.keys import Authority
from flwr_decentral.channel.tls import Security, explain
from flwr_decentral.core import ConfigurationError


def test_the_contexts_speak_tls_1_3_and_want_a_certificate(passports):
    contexts = passports.good[0].security.load()
    assert contexts.fingerprint == passports.good[0].fingerprint
    for context in (contexts.server, contexts.client):
        assert context.minimum_version == ssl.TLSVersion.TLSv1_3
        assert context.verify_mode == ssl.CERT_REQUIRED
        assert not context.check_hostname
    assert contexts.server.num_tickets == 0


def test_without_certificates_nothing_runs_unless_it_is_said_in_words(passports, caplog):
    good = passports.good[0].security
    with pytest.raises(ConfigurationError, match="peers need certificates: set peer-ca"):
        Security()
    with pytest.raises(ConfigurationError, match="only ca, cert is set"):
        Security(ca=good.ca, cert=good.cert)
    with pytest.raises(ConfigurationError, match="insecure = true, but ca, cert, key are given"):
        Security(ca=good.ca, cert=good.cert, key=good.key, insecure=True)
    assert Security(insecure=True).load() is None
    assert "models travel in plaintext" in caplog.text


def test_a_certificate_that_peers_would_refuse_is_refused_here(passports):
    for kind, complaint in (
        ("expired", "certificate has expired"),
        ("early", "certificate is not yet valid"),
        ("foreign", "unable to get local issuer certificate"),
    ):
        with pytest.raises(ConfigurationError, match=complaint):
            getattr(passports, kind).security.load()


def test_files_that_cannot_be_used_are_named(passports, tmp_path):
    good, other = passports.good[0].security, passports.good[1].security
    gone, garbage = tmp_path / "gone.pem", tmp_path / "garbage.pem"
    garbage.write_text("no certificate")
    for files, complaint in (
        ({"ca": gone}, f"cannot read peer-ca {gone}"),
        ({"ca": garbage}, f"cannot read peer-ca {garbage}"),
        ({"cert": garbage}, f"cannot use peer-cert {garbage}"),
        ({"key": other.key}, "KEY_VALUES_MISMATCH"),
    ):
        usual = {"ca": good.ca, "cert": good.cert, "key": good.key}
        with pytest.raises(ConfigurationError, match=complaint):
            Security(**{**usual, **files}).load()


def test_an_encrypted_key_is_refused_and_asks_nobody(passports, tmp_path):
    key = Authority.make("any").key
    encrypted = tmp_path / "key.pem"
    encrypted.write_bytes(
        key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.BestAvailableEncryption(b"secret"),
        )
    )
    good = passports.good[0].security
    with pytest.raises(ConfigurationError, match="peer-key is encrypted"):
        Security(ca=good.ca, cert=good.cert, key=encrypted).load()


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (ConnectionResetError(), "peer:closed-in-handshake"),
        (ssl.SSLEOFError(), "peer:closed-in-handshake"),
        (ssl.SSLError(1, "odd"), "tls-failed"),
    ],
)
def test_what_is_not_known_is_not_guessed(error, reason):
    assert explain(error).reason == reason
