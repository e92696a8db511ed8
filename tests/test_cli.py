"""The command line: what it lists, what it finds broken, and that it stays light."""

import subprocess
import sys
from importlib.machinery import ModuleSpec
from importlib.metadata import EntryPoint, PackageNotFoundError, version
from types import ModuleType, SimpleNamespace

import pytest
from typer.testing import CliRunner, Result

from flwr_decentral import cli, ops, plugins
from flwr_decentral.core import ConfigurationError, RuntimeFault

GOOD = ("gossip", "flwr_decentral.testing.toys:Gossip")
BROKEN = ("broken", "no_such_package:Gone")


def run(*arguments: str) -> Result:
    return CliRunner().invoke(cli.app, arguments, env={"COLUMNS": "240"})


@pytest.fixture(autouse=True)
def torch(monkeypatch) -> ModuleType:
    """Put a light module in the place of torch, which takes seconds to import."""
    module = ModuleType("torch")
    module.__spec__ = ModuleSpec("torch", None)
    module.__version__ = "2.9.0"
    module.get_num_threads = lambda: 3
    module.cuda = SimpleNamespace(
        is_available=lambda: False, device_count=lambda: 2, get_device_name=lambda i: f"GPU {i}"
    )
    monkeypatch.setitem(sys.modules, "torch", module)
    return module


@pytest.fixture
def install(monkeypatch):
    """Pretend that exactly these algorithms are installed."""

    def pretend(*plugs: tuple[str, str]) -> None:
        source = SimpleNamespace(name="some-dist", version="1.2.3")
        points = [EntryPoint(*plug, plugins.GROUP)._for(source) for plug in plugs]
        monkeypatch.setattr(plugins, "entry_points", lambda **_: points)

    return pretend


def findings() -> dict[str, cli.Finding]:
    return {finding.topic: finding for finding in cli._examine()}


def test_version():
    result = run("--version")
    assert result.exit_code == 0
    assert result.output == f"flwr-decentral {version('flwr-decentral')}\n"


def test_no_command_shows_the_help():
    assert "doctor" in run().output


def test_a_command_imports_neither_flower_nor_torch():
    script = "import sys, flwr_decentral.cli; print({'flwr', 'torch', 'ray'} & set(sys.modules))"
    command = [sys.executable, "-c", script]
    answer = subprocess.run(command, check=True, timeout=60, capture_output=True, text=True)
    assert answer.stdout == "set()\n"


# --- list -----------------------------------------------------------------------------------------


def test_list_shows_what_an_algorithm_is(install):
    install(GOOD)
    result = run("list")
    assert result.exit_code == 0
    for text in ("gossip", "1.2.3", "asynchronous", "ring"):
        assert text in result.output
    assert "relaysgd: pip install flwr-decentral-relaysgd\n" in result.output
    assert "swift-divshare: pip install flwr-decentral-swift\n" in result.output


def test_list_goes_on_after_a_broken_plugin(install):
    install(BROKEN, GOOD)
    result = run("list")
    assert result.exit_code == 0
    assert "cannot be used" in result.output
    assert "No module named 'no_such_package'" in result.output
    assert "asynchronous" in result.output


def test_list_of_nothing(install):
    install()
    assert "No algorithm is installed." in run("list").output


def test_list_shows_real_hyperparameters_with_their_defaults():
    pytest.importorskip("flwr_decentral_divshare")
    output = run("list").output
    assert "fragments = 10" in output
    assert "arXiv:2410.12918" in output


def test_list_topologies():
    result = run("list", "--topologies")
    assert result.exit_code == 0
    assert "ring" in result.output
    assert "hypercube" in result.output


# --- doctor ---------------------------------------------------------------------------------------


def test_doctor_of_a_sound_installation(install):
    install(GOOD)
    result = run("doctor")
    assert result.exit_code == 0
    assert "broken" not in result.output
    for text in ("python", version("flwr"), version("numpy"), "reference", "torch uses 3"):
        assert text in result.output
    assert "can be made and mapped" in result.output


def test_doctor_fails_for_a_broken_plugin(install):
    install(GOOD, BROKEN)
    result = run("doctor")
    assert result.exit_code == 1
    assert "No module named 'no_such_package'" in result.output
    assert "pip install --force-reinstall some-dist" in result.output


def test_doctor_without_any_algorithm(install):
    install()
    result = run("doctor")
    assert result.exit_code == 0
    assert "algorithms: pip install 'flwr-decentral[all]'" in result.output


@pytest.mark.parametrize(
    ("package", "state", "remedy"),
    [
        ("flwr", "broken", "pip install 'flwr>=1.42,<2'"),
        ("networkx", "broken", "pip install 'networkx>=3.2'"),
        ("ray", "note", "pip install 'flwr-decentral[simulation]'"),
    ],
)
def test_doctor_says_how_to_get_a_missing_package(package, state, remedy, install, monkeypatch):
    def absent(name: str) -> str:
        if name == package:
            raise PackageNotFoundError(name)
        return version(name)

    install(GOOD)
    monkeypatch.setattr(cli.metadata, "version", absent)
    finding = findings()[package]
    assert (finding.state, finding.remedy) == (state, remedy)
    result = run("doctor")
    assert f"{package}: {remedy}" in result.output
    assert result.exit_code == (state == "broken")


@pytest.mark.parametrize(
    ("installed", "state"),
    [
        ("1.41.9", "broken"),
        ("1.42.0", "ok"),
        ("1.43.0.dev1", "ok"),
        ("1.100.0", "ok"),
        ("2.0", "broken"),
    ],
)
def test_doctor_compares_the_version_of_flower(installed, state, monkeypatch):
    monkeypatch.setattr(cli.metadata, "version", lambda _: installed)
    finding = cli._package("flwr", "flwr>=1.42,<2", least=(1, 42), below=(2, 0))
    assert finding.state == state


def test_doctor_finds_a_package_without_its_module(monkeypatch):
    monkeypatch.setattr(cli.metadata, "version", lambda _: "1.42.0")
    finding = cli._package("no_such_module", "no_such_module>=1")
    assert finding.state == "broken"
    assert "--force-reinstall" in finding.remedy


def test_doctor_without_torch(monkeypatch):
    monkeypatch.setattr(cli, "find_spec", lambda _: None)
    module, finding = cli._torch()
    assert module is None
    assert (finding.state, finding.remedy) == ("note", "pip install torch")


def test_doctor_with_a_broken_torch(monkeypatch):
    def fail(_: str) -> ModuleType:
        raise OSError("libcudart.so.12: cannot open shared object file")

    monkeypatch.setattr(cli.importlib, "import_module", fail)
    module, finding = cli._torch()
    assert module is None
    assert finding.state == "note"
    assert "libcudart.so.12" in finding.detail


def test_doctor_names_the_gpus(torch, monkeypatch):
    torch.cuda.is_available = lambda: True
    assert cli._gpus(torch).detail == "torch sees GPU 0, GPU 1"
    monkeypatch.setattr(cli, "_nvidia_smi", lambda: ["H100"])
    finding = cli._gpus(None)
    assert finding.state == "note"
    assert "the driver sees H100, but torch is not installed" in finding.detail
    torch.cuda.is_available = lambda: False
    assert "but torch does not" in cli._gpus(torch).detail
    monkeypatch.setattr(cli, "_nvidia_smi", list)
    assert cli._gpus(torch).state == "ok"


def test_nvidia_smi_may_be_missing_or_fail(monkeypatch):
    monkeypatch.setenv("PATH", "")
    assert cli._nvidia_smi() == []


def test_doctor_reports_an_unknown_backend(monkeypatch):
    monkeypatch.setenv(ops.VARIABLE, "no-such-backend")
    finding = next(cli._backends())
    assert finding.state == "broken"
    assert "no-such-backend" in finding.detail
    assert finding.remedy == "unset FLWR_DECENTRAL_OPS, which means reference"


def test_doctor_shows_what_arithmetic_there_is_and_what_it_lacks(monkeypatch):
    def choose(name=None):
        if name == "broken":
            raise ConfigurationError("it needs a device, and there is none")
        return SimpleNamespace(name="old") if name == "old" else ops.Reference()

    monkeypatch.delenv(ops.VARIABLE, raising=False)
    names = dict.fromkeys(["reference", "old", "broken"], "somewhere")
    monkeypatch.setattr(cli.ops, "available", lambda: names)
    monkeypatch.setattr(cli.ops, "choose", choose)
    chosen, broken, old = cli._backends()
    assert chosen.detail.startswith("reference: numpy ")
    assert broken.state == "note"
    assert broken.detail == "cannot be used: it needs a device, and there is none"
    assert (old.state, old.detail) == ("ok", "types; FLWR_DECENTRAL_OPS=old chooses it")


def test_doctor_reports_that_memory_cannot_be_shared(install, monkeypatch):
    def fail(**_: int) -> None:
        raise RuntimeFault("cannot allocate 1 MiB of shared memory")

    install(GOOD)
    monkeypatch.setattr(cli.Arena, "create", fail)
    result = run("doctor")
    assert result.exit_code == 1
    assert "cannot allocate 1 MiB of shared memory" in result.output
    assert "memfd_create" in result.output


def test_doctor_notes_a_small_shm(monkeypatch):
    usage = SimpleNamespace(total=64 * 2**20, free=60 * 2**20)
    monkeypatch.setattr(cli.shutil, "disk_usage", lambda _: usage)
    finding = cli._shm()
    assert finding.state == "note"
    assert "--shm-size" in finding.remedy
