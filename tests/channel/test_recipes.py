"""What docs/deployment.md gives to copy starts a sidecar: the unit, the compose file, the pod."""

import json
import re
import subprocess
import sys
from configparser import ConfigParser
from pathlib import Path

import pytest
import yaml

from flwr_decentral.channel.client import ask
from flwr_decentral.channel.keys import make_keys, node_folder
from flwr_decentral.testing.ports import free_ports

pytestmark = [pytest.mark.net, pytest.mark.slow]

PAGE = (Path(__file__).parents[2] / "docs" / "deployment.md").read_text()


def block(language: str, word: str) -> str:
    """Find the only block of code of that language with that word."""
    (found,) = [
        text for text in re.findall(rf"```{language}\n(.*?)```", PAGE, re.DOTALL) if word in text
    ]
    return found


def of_unit() -> list[str]:
    unit = ConfigParser(interpolation=None)
    unit.optionxform = str
    unit.read_string(block("ini", "ExecStart"))
    return re.sub(r"\\\s*\n", " ", unit["Service"]["ExecStart"]).split()


def of_compose() -> list[str]:
    sidecar = yaml.safe_load(block("yaml", "services:"))["services"]["sidecar"]
    return sidecar["entrypoint"] + sidecar["command"]


def of_pod() -> list[str]:
    containers = yaml.safe_load(block("yaml", "kind: Pod"))["spec"]["containers"]
    (sidecar,) = [each for each in containers if each["name"] == "sidecar"]
    return sidecar["command"] + sidecar["args"]


@pytest.mark.parametrize("words", [of_unit, of_compose, of_pod], ids=["unit", "compose", "pod"])
def test_a_sidecar_starts_as_the_page_says(words, tmp_path):
    command, subcommand, *options = words()
    assert command.endswith("flwr-decentral")
    make_keys(tmp_path / "keys", 1, 1)
    (port,) = free_ports(1)
    places = {
        "/run/flwr-decentral": str(tmp_path),
        "/etc/flwr-decentral": str(node_folder(tmp_path / "keys", 0)),
        "/keys": str(node_folder(tmp_path / "keys", 0)),
        "0.0.0.0:48200": f"127.0.0.1:{port}",
        ":48200": f":{port}",
    }
    place = re.compile("|".join(map(re.escape, places)))
    there = [place.sub(lambda found: places[found[0]], option) for option in options]
    program = str(Path(sys.executable).with_name("flwr-decentral"))
    sidecar = subprocess.Popen(
        [program, subcommand, *there], stderr=subprocess.PIPE, stdin=subprocess.DEVNULL, text=True
    )
    try:
        answer = ask(str(tmp_path / "node.sock"), "status", patience=30.0)
        assert answer["process"] == sidecar.pid
        assert re.fullmatch(rf"node-?0\.example\.org:{port}", answer["address"])
        assert answer["fingerprint"]
        shown = subprocess.run(
            [program, "sidecar", "status", "--json", "--socket", str(tmp_path / "node.sock")],
            capture_output=True,
            check=True,
        )
        assert json.loads(shown.stdout)["process"] == sidecar.pid
    finally:
        sidecar.terminate()
        _, said = sidecar.communicate(timeout=30)
    assert "Traceback" not in said
