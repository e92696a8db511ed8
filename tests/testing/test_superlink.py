"""LocalSuperLink with stand-ins for Flower's commands and, once, with Flower."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from flwr_decentral.testing.keeper import processes_of
from flwr_decentral.testing.superlink import LocalSuperLink, SuperLinkError

pytestmark = [pytest.mark.net, pytest.mark.slow]

# Stand-ins, told by a word in the environment how to misbehave. The SuperLink starts a process that
# has neither its session nor its environment, as Ray does.
SUPERLINK = """
import http.server, os, subprocess, sys, time
print("the SuperLink starts", flush=True)
mood = os.environ.get("MOOD")
if mood == "die":
    sys.exit("no such database")
subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"],
                 cwd="/", env={}, start_new_session=True)
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        time.sleep(600 if mood == "mute" else 0)
        self.send_response(200)
        self.end_headers()
http.server.HTTPServer(("127.0.0.1", int(sys.argv[-1])), Handler).serve_forever()
"""
FLWR = """
import json, os, pathlib, sys, time, tomllib
home, mood = pathlib.Path(os.environ["FLWR_HOME"]), os.environ.get("MOOD")
command, *arguments = sys.argv[1:]
status = home / "status"
if command == "run":
    files = [word for word in arguments if word.endswith(".toml")]
    (home / "seen").write_text(json.dumps([tomllib.load(open(file, "rb")) for file in files]))
    status.write_text("running")
    if mood == "refuse":
        print(json.dumps({"success": False, "error-message": "no such key"}))
    elif mood == "babble":
        print("Hello!")
    else:
        print(json.dumps({"success": True, "run-id": "7"}))
elif command == "log":
    print("round 1\\nround 2")
    if mood == "hang":
        time.sleep(600)
    if mood == "break":
        sys.exit("no such run")
    status.write_text("finished:failed" if mood == "fail" else "finished:completed")
elif command == "ls":
    run = {"status": status.read_text(), "status-details": "N/A"}
    print(json.dumps({"success": True, "runs": [] if mood == "forget" else [run]}))
elif command == "stop":
    over = status.read_text().startswith("finished")
    if not over:
        status.write_text("finished:stopped")
    print(json.dumps({"success": not over, "error-message": "Run is already finished."}))
"""


@pytest.fixture
def commands(tmp_path, monkeypatch):
    """A folder of commands beside a Python, as in a virtual environment."""
    folder = tmp_path / "bin"
    folder.mkdir()
    python = os.path.realpath(sys.executable)
    for name, text in (("flower-superlink", SUPERLINK), ("flwr", FLWR)):
        (folder / name).write_text(f"#!{python} -IS\n{text}")
        (folder / name).chmod(0o755)
    (folder / "python").symlink_to(python)
    monkeypatch.setattr(sys, "executable", str(folder / "python"))
    monkeypatch.delenv("MOOD", raising=False)
    return folder


@pytest.fixture
def app(commands, tmp_path):
    folder = tmp_path / "my-app"
    folder.mkdir()
    return folder


def alive(home):
    return processes_of(Path(home))


def in_mood(mood, **options):
    return LocalSuperLink(environ={"MOOD": mood}, **options)


def test_a_run_comes_back_with_status_and_log(app):
    heard = []
    with LocalSuperLink() as superlink:
        run = superlink.run(app, echo=heard.append)
    assert run.run_id == 7
    assert run.status == "finished:completed"
    assert run.completed
    assert run.details == ""
    assert run.log == "round 1\nround 2"
    assert heard == ["round 1", "round 2"]
    assert run.seconds > 0


def test_values_arrive_as_they_are(app):
    config = {
        "topology": 'file: "my graph".txt',
        "divshare.fragments": 4,
        "transcript": True,
        "rate": 1e-7,
        "name": "it's ρ",
    }
    with LocalSuperLink() as superlink:
        superlink.run(app, run_config=config, nodes=3, gpus_per_client=0.5, actors=2)
        federation, seen = json.loads((superlink.home / "seen").read_text())
    fragments = seen.pop("divshare")["fragments"]
    assert {**seen, "divshare.fragments": fragments} == config
    assert federation == {
        "num-supernodes": 3,
        "client-resources-num-cpus": 1,
        "client-resources-num-gpus": 0.5,
        "init-args-num-cpus": 2,
    }


@pytest.mark.parametrize(
    ("value", "error", "words"),
    [
        (None, TypeError, "seed: Flower takes bool, int, float and str, got NoneType"),
        ([1], TypeError, "got list"),
        (float("nan"), ValueError, "seed: Flower takes finite numbers, got nan"),
    ],
)
def test_values_that_flower_cannot_carry_are_refused(app, value, error, words):
    with LocalSuperLink() as superlink, pytest.raises(error, match=words):
        superlink.run(app, run_config={"seed": value})


def test_a_run_that_fails_is_not_an_error(app):
    with in_mood("fail") as superlink:
        run = superlink.run(app)
    assert run.status == "finished:failed"
    assert run.finished
    assert not run.completed


def test_a_run_that_takes_too_long_is_stopped(app):
    words = (
        r"waited [0-9.]+ s for run 7 to finish\n  the SuperLink's log ends with:\n    the SuperLink"
    )
    with in_mood("hang") as superlink:
        with pytest.raises(SuperLinkError, match=words):
            superlink.run(app, timeout=3.0)
        assert (superlink.home / "status").read_text() == "finished:stopped"


def test_a_run_can_be_stopped_and_may_have_finished_before(app):
    with LocalSuperLink() as superlink:
        run = superlink.run(app, stream=False)
        assert run.status == "pending"
        assert not run.finished
        assert superlink.stop(run).status == "finished:stopped"
        done = superlink.run(app)
        assert superlink.stop(done).status == "finished:completed"
        assert superlink.stop(done).log == done.log


@pytest.mark.parametrize(
    ("mood", "words"),
    [
        ("refuse", "flwr run: no such key\n  the SuperLink's log"),
        ("babble", "flwr run answered no JSON: Hello!"),
        ("break", "flwr log ended with exit code 1: no such run\n"),
        ("forget", "flwr ls described run 7 as {'success': True, 'runs': ..}"),
    ],
)
def test_what_a_command_says_is_passed_on(app, mood, words):
    with in_mood(mood) as superlink, pytest.raises(SuperLinkError, match=words):
        superlink.run(app)


class Attended(LocalSuperLink):
    """A SuperLink with a companion that ends soon."""

    def _start(self):
        super()._start()
        self._spawn("companion", "python", "-c", "raise SystemExit('cannot bind the port')")


def test_a_companion_that_has_ended_is_noticed_before_a_run(app):
    with Attended() as superlink:
        superlink._processes["companion"].wait(20)
        words = (
            r"companion ended with exit code 1\n  the log of companion ends with:\n.*cannot bind"
        )
        with pytest.raises(SuperLinkError, match=words):
            superlink.run(app)


@pytest.mark.usefixtures("commands")
def test_a_superlink_that_ends_at_once_says_why():
    superlink = in_mood("die")
    with (
        pytest.raises(SuperLinkError, match=r"exit code 1\n.*\n.*starts\n.*no such database"),
        superlink,
    ):
        pass
    assert not superlink.home.exists()


@pytest.mark.usefixtures("commands")
def test_a_superlink_that_does_not_answer_is_given_up():
    superlink = in_mood("mute", start_timeout=0.5)
    with pytest.raises(SuperLinkError, match="s for the SuperLink to answer"), superlink:
        pass
    assert not alive(superlink.home)
    assert not superlink.home.exists()


def test_without_flower_it_says_what_to_install(commands):
    (commands / "flwr").unlink()
    with pytest.raises(SuperLinkError, match=r"no .*flwr: pip install 'flwr\[simulation\]'"):
        LocalSuperLink().__enter__()


def test_nothing_is_left(app):
    with LocalSuperLink() as superlink:
        superlink.run(app)
        assert len(alive(superlink.home)) == 2
    assert not alive(superlink.home)
    assert not superlink.home.exists()


@pytest.mark.parametrize("error", [KeyboardInterrupt, ZeroDivisionError])
def test_nothing_is_left_after_an_error(app, error):
    def interrupt(_):
        raise error

    with pytest.raises(error), LocalSuperLink() as superlink:
        superlink.run(app, echo=interrupt)
    assert not alive(superlink.home)
    assert not superlink.home.exists()


def test_nothing_is_left_by_a_process_that_was_killed(commands):
    script = """
        import sys, time
        from flwr_decentral.testing.superlink import LocalSuperLink
        python, sys.executable = sys.executable, sys.argv[1]
        with LocalSuperLink() as superlink:
            print(superlink.home, flush=True)
            time.sleep(600)
    """
    python = Path(sys.prefix) / "bin" / "python"
    with subprocess.Popen(
        [python, "-c", textwrap.dedent(script), commands / "python"], stdout=subprocess.PIPE
    ) as process:
        home = Path(process.stdout.readline().decode().strip())
        assert alive(home)
        process.send_signal(signal.SIGKILL)
    deadline = time.monotonic() + 30
    while (alive(home) or home.exists()) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not alive(home)
    assert not home.exists()


def test_the_home_can_be_kept(app):
    with LocalSuperLink(keep=True) as superlink:
        superlink.run(app)
    log = superlink.log_path.read_text()
    shutil.rmtree(superlink.home)
    assert "the SuperLink starts" in log
    assert not alive(superlink.home)


MINIMAL = {
    "pyproject.toml": """
        [project]
        name = "minimal"
        version = "1.0.0"
        description = "Ask every node once"
        license = "Apache-2.0"
        dependencies = []
        [tool.flwr.app]
        publisher = "flwr-decentral"
        [tool.flwr.app.components]
        serverapp = "minimal.server_app:app"
        clientapp = "minimal.client_app:app"
        [tool.flwr.app.config]
        word = ""
        """,
    "minimal/__init__.py": "",
    "minimal/client_app.py": """
        from flwr.app import Message, RecordDict
        from flwr.clientapp import ClientApp
        app = ClientApp()
        @app.train()
        def train(msg, context):
            return Message(RecordDict(), reply_to=msg)
        """,
    "minimal/server_app.py": """
        import time
        from flwr.app import Message, MessageType, RecordDict
        from flwr.serverapp import ServerApp
        app = ServerApp()
        @app.main()
        def main(grid, context):
            if context.run_config["word"] == "fail":
                raise RuntimeError("as it was told")
            while len(nodes := list(grid.get_node_ids())) < 3:
                time.sleep(0.1)
            replies = grid.send_and_receive([
                Message(RecordDict(), dst_node_id=node, message_type=MessageType.TRAIN)
                for node in nodes
            ])
            print(context.run_config["word"], len(list(replies)))
        """,
}


@pytest.mark.flower
def test_flower_runs_and_fails_and_leaves_nothing(tmp_path):
    for name, text in MINIMAL.items():
        path = tmp_path / "minimal" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(textwrap.dedent(text))
    with LocalSuperLink() as superlink:
        run = superlink.run(
            tmp_path / "minimal", run_config={"word": 'a "word"'}, nodes=3, actors=1
        )
        assert run.status == "finished:completed", run.log
        assert 'a "word" 3' in run.log
        assert alive(superlink.home)
        failed = superlink.run(tmp_path / "minimal", run_config={"word": "fail"}, nodes=3, actors=1)
        assert failed.status == "finished:failed"
        assert "as it was told" in failed.log
        with pytest.raises(SuperLinkError, match=r"(?s)flwr run: .*Key 'wrod' is not present"):
            superlink.run(tmp_path / "minimal", run_config={"wrod": "x"})
        # Ended in the middle of a run, with actors at work.
        superlink.run(tmp_path / "minimal", nodes=4, stream=False)
    assert not alive(superlink.home)
    assert not superlink.home.exists()
