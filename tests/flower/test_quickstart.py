"""The quickstart app becomes decentralized by the diff in its README, and trains either way."""

import importlib
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from .inprocess import run_in_process

ROOT = Path(__file__).parents[2]
APP = ROOT / "apps" / "quickstart"
FILES = ("client_app.py", "server_app.py", "task.py", "__init__.py")


def diff_in(readme: Path) -> str:
    (diff,) = re.findall(r"```diff\n(--- a/quickstart.*?)```", readme.read_text(), re.DOTALL)
    return diff


def apply_diff(folder: Path) -> None:
    shutil.copytree(APP / "quickstart", folder / "quickstart", ignore=lambda *_: ["__pycache__"])
    command = ["patch", "-p1", "--batch", "--fuzz=0"]
    done = subprocess.run(
        command, cwd=folder, input=diff_in(APP / "README.md"), text=True, capture_output=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "offset" not in done.stdout


def test_three_lines_change_and_no_others(tmp_path):
    apply_diff(tmp_path)
    changed = 0
    for name in FILES:
        before = (APP / "quickstart" / name).read_text().splitlines()
        after = (tmp_path / "quickstart" / name).read_text().splitlines()
        assert len(before) == len(after)
        changed += sum(a != b for a, b in zip(before, after, strict=True))
    assert changed == 3


def test_the_readme_shows_the_diff_of_the_app():
    assert diff_in(ROOT / "README.md") == diff_in(APP / "README.md")


@pytest.fixture
def cifar():
    pytest.importorskip("torchvision")
    folder = os.environ.get("FLWR_DECENTRAL_DATA")
    if not folder or not (Path(folder) / "cifar10" / "train").is_dir():
        pytest.skip("FLWR_DECENTRAL_DATA names no folder with cifar10/train and cifar10/test")
    return str(Path(folder) / "cifar10")


@pytest.fixture(params=["as it is", "with the diff"])
def quickstart(request, tmp_path, monkeypatch):
    """Import the app, changed or not."""
    if request.param == "with the diff":
        apply_diff(tmp_path)
    else:
        shutil.copytree(APP / "quickstart", tmp_path / "quickstart")
    monkeypatch.syspath_prepend(tmp_path)
    for name in [name for name in sys.modules if name.split(".")[0] == "quickstart"]:
        monkeypatch.delitem(sys.modules, name)
    client = importlib.import_module("quickstart.client_app")
    server = importlib.import_module("quickstart.server_app")
    yield client, server, request.param
    for name in [name for name in sys.modules if name.split(".")[0] == "quickstart"]:
        del sys.modules[name]


@pytest.mark.flower
def test_it_learns_either_way(quickstart, cifar, capsys):
    client, server, version = quickstart
    config = {
        "data-dir": cifar,
        "num-server-rounds": 3,
        "local-epochs": 3,
        "batch-size": 8,
        "learning-rate": 0.01,
    }
    context = SimpleNamespace(run_config=config)
    run_in_process(
        lambda grid: server.main(grid, context), client.app, 2, workers=1, run_config=config
    )
    said = capsys.readouterr().out
    accuracy = float(re.search(r"final accuracy: ([0-9.]+)", said)[1])
    assert accuracy > 0.15, version  # ten classes, and a hundred images of each
