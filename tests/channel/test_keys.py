"""Keys for a trial: private files, one folder for each node, and certificates that hold up."""

import stat
import subprocess
import sys
from datetime import UTC, datetime, timedelta

import pytest
from cryptography import x509
from typer.testing import CliRunner

from flwr_decentral import cli
from flwr_decentral.channel.keys import CA_CERT, CA_KEY, CERT, KEY, make_keys, node_folder
from flwr_decentral.channel.tls import Security
from flwr_decentral.core import ConfigurationError


def run(*arguments: str):
    return CliRunner().invoke(cli.app, ["keys", *arguments], env={"COLUMNS": "240"})


def security(folder, node: int) -> Security:
    home = node_folder(folder, node)
    return Security(ca=home / CA_CERT, cert=home / CERT, key=home / KEY)


def test_each_node_gets_a_folder_with_all_that_it_needs(tmp_path):
    folder = tmp_path / "keys"
    result = run(str(folder), "--nodes", "3", "--days", "7")
    assert result.exit_code == 0, result.output
    for node in range(3):
        contexts = security(folder, node).load()
        assert f"node {node}  sha256:{contexts.fingerprint}" in result.output
    assert f"{node_folder(folder, 0)}/" in result.output
    assert 'peer-ca="PATH/ca.pem" peer-cert="PATH/cert.pem" peer-key="PATH/key.pem"' in (
        result.output
    )
    assert f"{folder / CA_KEY} can sign more nodes" in result.output


def test_nobody_else_can_read_anything(tmp_path):
    folder = tmp_path / "deep" / "keys"
    make_keys(folder, 2, 1)
    everything = [folder, *folder.rglob("*")]
    assert len(everything) == 1 + 2 + 2 * 4
    for path in everything:
        mode = stat.S_IMODE(path.stat().st_mode)
        assert mode == (0o700 if path.is_dir() else 0o600), path


@pytest.mark.parametrize("there", ["ca.pem", "node-1", "notes.txt"])
def test_nothing_is_overwritten(tmp_path, there):
    (tmp_path / there).write_text("precious")
    result = run(str(tmp_path), "--nodes", "2")
    assert result.exit_code == 1
    assert "is not empty, and nothing is overwritten" in result.output
    assert [path.name for path in tmp_path.iterdir()] == [there]
    assert (tmp_path / there).read_text() == "precious"


def test_a_folder_that_cannot_be_is_an_error_not_a_traceback(tmp_path):
    (tmp_path / "file").write_text("x")
    result = run(str(tmp_path / "file"), "--nodes", "2")
    assert result.exit_code == 1
    assert result.output.startswith("[configuration] cannot use")
    result = run(str(tmp_path / "file" / "deeper"), "--nodes", "2")
    assert result.exit_code == 1
    assert result.output.startswith("[configuration] cannot")
    with pytest.raises(ConfigurationError, match="cannot make 0 certificates"):
        make_keys(tmp_path / "none", 0, 1)


def test_certificates_hold_from_a_little_before_to_the_day_asked_for(tmp_path):
    make_keys(tmp_path / "keys", 1, 7)
    home = node_folder(tmp_path / "keys", 0)
    certificate = x509.load_pem_x509_certificate((home / CERT).read_bytes())
    now = datetime.now(UTC)
    assert timedelta(0) < now - certificate.not_valid_before_utc < timedelta(hours=2)
    assert timedelta(days=6) < certificate.not_valid_after_utc - now <= timedelta(days=7)
    assert not certificate.extensions.get_extension_for_class(x509.BasicConstraints).value.ca
    usage = certificate.extensions.get_extension_for_class(x509.ExtendedKeyUsage).value
    assert len(usage) == 2


def test_a_node_of_another_trial_is_of_another_ca(tmp_path):
    for name in ("one", "two"):
        make_keys(tmp_path / name, 1, 1)
    mixed = Security(
        ca=node_folder(tmp_path / "one", 0) / CA_CERT,
        cert=node_folder(tmp_path / "two", 0) / CERT,
        key=node_folder(tmp_path / "two", 0) / KEY,
    )
    with pytest.raises(ConfigurationError, match="would refuse this node's certificate"):
        mixed.load()


@pytest.mark.slow
def test_the_network_itself_does_without_cryptography():
    script = (
        "import sys, flwr_decentral.cli, flwr_decentral.channel.network; "
        "print({'cryptography', 'flwr'} & set(sys.modules))"
    )
    command = [sys.executable, "-c", script]
    answer = subprocess.run(command, check=True, timeout=60, capture_output=True, text=True)
    assert answer.stdout == "set()\n"
