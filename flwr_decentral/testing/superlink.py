"""A SuperLink of one's own, for tests and demonstrations that really run ``flwr run``.

When Flower first needs a SuperLink on this machine it starts one, detached, on a fixed port and
with the environment of the moment, and leaves it running. :class:`LocalSuperLink` is one that
belongs to a ``with`` block: a port and a ``FLWR_HOME`` of its own, no network beyond this machine,
and nothing left in the end, neither a process nor a file, whatever becomes of the process that
opened it. So is a :class:`~flwr_decentral.testing.deployment.Deployment`, which has SuperNodes.

>>> with LocalSuperLink() as superlink:  # doctest: +SKIP
...     run = superlink.run("apps/digits", run_config={"algorithm": "divshare"}, echo=print)
>>> run.status  # doctest: +SKIP
'finished:completed'

This module imports the standard library only and talks to Flower through its commands. Exit codes
of ``flwr run`` do not tell how a run ended, so the status comes from ``flwr ls``.
"""

# ruff: noqa: TID251 - a SuperLink is a process, with a port and deadlines

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import tempfile
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

from .commands import (
    CommandError,
    Config,
    Scalar,
    answers,
    executable,
    run_command,
    write_toml,
)
from .keeper import END_TIMEOUT, end_processes, processes_of, start_keeper
from .ports import free_ports

__all__ = ["FlowerRun", "LocalSuperLink", "SuperLink", "SuperLinkError"]

OFFLINE: Final[Mapping[str, str]] = {
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
}
"""What keeps Flower and Ray from using the network or installing an app's dependencies."""

START_TIMEOUT: Final = 90.0
"""Seconds for the SuperLink to answer. Alone on a machine it takes about 5."""

COMMAND_TIMEOUT: Final = 60.0
"""Seconds for a ``flwr`` command that only asks the SuperLink something."""

_SUPERLINK: Final = "superlink"

# A Unix socket's path has at most 107 characters, of which Ray needs about 70.
_LONGEST_RAY_FOLDER: Final = 36


class SuperLinkError(RuntimeError):
    """Report a SuperLink or a ``flwr`` command that failed or took too long."""


@dataclass(frozen=True, kw_only=True)
class FlowerRun:
    """A run, and how it ended.

    Attributes
    ----------
    run_id : int
        Flower's id.
    status : str
        What ``flwr ls`` says, such as ``"finished:completed"``, ``"finished:failed"`` or
        ``"finished:stopped"``.
    details : str
        Flower's explanation of the status, often empty.
    log : str
        What the run has logged; empty if it was not waited for.
    seconds : float
        Wall-clock time from the command to the end of the run, start-up included.
    """

    run_id: int
    status: str
    details: str = ""
    log: str = ""
    seconds: float = 0.0

    @property
    def completed(self) -> bool:
        """Whether the run finished without an error."""
        return self.status == "finished:completed"

    @property
    def finished(self) -> bool:
        """Whether the run has ended, in whatever way."""
        return self.status.startswith("finished")


class SuperLink:
    """Start a SuperLink, and end it and all it has started.

    ServerApps and ClientApps inherit the environment, and run in :attr:`home`: paths in a run
    config must be absolute.

    Parameters
    ----------
    keep : bool (default: False)
        Keep :attr:`home`, with logs and what the runs have written below it.
    environ : mapping of str to str, optional
        Added to the environment of the SuperLink and thereby of its runs.
    start_timeout : float (default: 90.0)
        Seconds for the SuperLink to answer.

    Attributes
    ----------
    home : Path
        The temporary folder that is its ``FLWR_HOME``.
    log_path : Path
        What the SuperLink and its processes print.
    """

    def __init__(
        self,
        *,
        keep: bool = False,
        environ: Mapping[str, str] | None = None,
        start_timeout: float = START_TIMEOUT,
    ) -> None:
        self._keep = keep
        self._added = dict(environ or {})
        self._start_timeout = start_timeout
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self._keeper: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        if not Path("/proc/self/environ").exists():
            raise SuperLinkError("its processes are found in /proc: this needs Linux")
        for command in ("flwr", "flower-superlink"):
            if not executable(command).exists():
                raise SuperLinkError(
                    f"there is no {executable(command)}: pip install 'flwr[simulation]' into the "
                    "environment of this Python"
                )
        self.home = Path(tempfile.mkdtemp(prefix="flwr-")).resolve()
        self.log_path = self.home / "superlink.log"
        try:
            self._keeper = start_keeper(self.home, keep=self._keep)
            self._start()
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        survivors = self._end()
        if survivors and error is None:
            raise SuperLinkError(
                f"waited {END_TIMEOUT:.0f} s for the processes of the SuperLink in {self.home} to "
                f"end; still there: {survivors}"
            )

    def run(
        self,
        app: str | Path,
        *,
        run_config: Config | None = None,
        timeout: float = 300.0,
        stream: bool = True,
        echo: Callable[[str], object] | None = None,
        federation: Config | None = None,
    ) -> FlowerRun:
        """Run an app to its end, as ``flwr run APP --stream`` does.

        Parameters
        ----------
        app : str or Path
            The folder of the app.
        run_config : mapping, optional
            What to override in the app's ``[tool.flwr.app.config]``; dotted keys for tables.
        timeout : float (default: 300.0)
            Seconds for the whole run, start-up included; a run that takes longer is stopped.
        stream : bool (default: True)
            Whether to wait for the end. If not, see :meth:`wait` and :meth:`stop`.
        echo : callable, optional
            Called with each line of the log, while the run goes on.
        federation : mapping, optional
            What to override in the federation's configuration.

        Raises
        ------
        SuperLinkError
            If the app was refused or the timeout has passed. A run that fails raises nothing: see
            :attr:`FlowerRun.status`.
        """
        self._check_alive()
        started = time.monotonic()
        app = Path(app).resolve()
        with tempfile.TemporaryDirectory(dir=self.home) as folder:
            arguments = []
            # Files and not arguments: Flower splits arguments at blanks and quotes.
            for name, values in (("federation", federation), ("run", run_config)):
                if values:
                    arguments += [f"--{name}-config", write_toml(values, folder, name)]
            answer = self._ask(
                ["run", str(app), *arguments], f"flwr run to submit {app.name}", min(timeout, 60.0)
            )
        spent = time.monotonic() - started
        run = FlowerRun(run_id=int(answer["run-id"]), status="pending", seconds=spent)
        if not stream:
            return run
        try:
            return self.wait(run, timeout=max(timeout - spent, 0.0), echo=echo)
        except SuperLinkError:
            with contextlib.suppress(SuperLinkError):
                self.stop(run)
            raise

    def wait(
        self,
        run: FlowerRun,
        *,
        timeout: float = 300.0,
        echo: Callable[[str], object] | None = None,
    ) -> FlowerRun:
        """Wait for the end of a run.

        Parameters
        ----------
        run : FlowerRun
            What :meth:`run` returned with ``stream=False``.
        timeout : float (default: 300.0)
            Seconds to wait.
        echo : callable, optional
            Called with each line of the log, from the first.

        Raises
        ------
        SuperLinkError
            If the run has not ended by then; it goes on.
        """
        started = time.monotonic()
        lines: list[str] = []

        def keep(line: str) -> None:
            lines.append(line)
            if echo is not None:
                echo(line)

        what = f"run {run.run_id} to finish"
        self._flwr(["log", str(run.run_id), "--stream"], what, timeout, keep)
        # The log ends shortly before the status changes.
        while not (now := self._look_up(run.run_id)).finished:
            if time.monotonic() - started > timeout:
                raise self._overdue(f"{what} (it is {now.status})", timeout)
            time.sleep(0.5)
        seconds = run.seconds + time.monotonic() - started
        return replace(now, log="\n".join(lines), seconds=seconds)

    def log(self, run: FlowerRun) -> str:
        """Return what a run has logged so far."""
        lines: list[str] = []
        what = f"flwr log to show run {run.run_id}"
        self._flwr(["log", str(run.run_id), "--show"], what, COMMAND_TIMEOUT, lines.append)
        return "\n".join(lines)

    def stop(self, run: FlowerRun) -> FlowerRun:
        """Stop a run, and say how it ended: it may have finished just before."""
        refusal = None
        try:
            self._ask(["stop", str(run.run_id)], f"flwr stop to end run {run.run_id}")
        except SuperLinkError as error:
            refusal = error
        now = self._look_up(run.run_id)
        if refusal is not None and not now.finished:
            raise refusal
        return replace(now, log=run.log, seconds=run.seconds)

    @property
    def environ(self) -> dict[str, str]:
        """The environment of the SuperLink and of the ``flwr`` commands that talk to it."""
        inherited = {
            name: value
            for name, value in os.environ.items()
            if name != "RAY_ADDRESS"  # that is someone else's cluster
        }
        # Flower starts its own processes by name.
        path = f"{executable('flwr').parent}{os.pathsep}{inherited.get('PATH', os.defpath)}"
        own = {"FLWR_HOME": str(self.home), "PATH": path, "PYTHONUNBUFFERED": "1"}
        if len(str(self.home)) <= _LONGEST_RAY_FOLDER:
            own["RAY_TMPDIR"] = str(self.home)
        return {**inherited, **OFFLINE, **self._added, **own}

    def _start(self) -> None:
        """Start all there is, and wait until the SuperLink answers."""
        raise NotImplementedError

    def _spawn(self, name: str, command: str, *arguments: str) -> None:
        """Start a process that logs to a file of its name, and is ended with all others."""
        with (self.home / f"{name}.log").open("ab") as log:
            self._processes[name] = subprocess.Popen(
                [str(executable(command)), *arguments],
                cwd=self.home,
                env=self.environ,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def _start_superlink(self, *arguments: str, port: int, ca: Path | None = None) -> None:
        """Start the SuperLink, let ``flwr`` know it, and wait until it answers."""
        trust = "insecure = true" if ca is None else f'root-certificates = "{ca}"'
        (self.home / "config.toml").write_text(
            "[superlink]\n"
            'default = "local"\n'
            "[superlink.local]\n"
            f'address = "127.0.0.1:{port}"\n'
            f"{trust}\n",
            encoding="utf-8",
        )
        options = ["--host", "127.0.0.1", "--port", str(port)]
        self._spawn(_SUPERLINK, "flower-superlink", *arguments, *options)
        deadline = time.monotonic() + self._start_timeout
        scheme = "http" if ca is None else "https"
        while not answers(f"{scheme}://127.0.0.1:{port}/health", ca):
            self._check_alive()
            if time.monotonic() > deadline:
                raise self._overdue("the SuperLink to answer", self._start_timeout)
            time.sleep(0.1)

    def _check_alive(self) -> None:
        """Notice a process that has ended by itself, and say what it said."""
        for name, process in self._processes.items():
            if (code := process.poll()) is not None:
                who = "the SuperLink" if name == _SUPERLINK else name
                raise SuperLinkError(f"{who} ended with exit code {code}{self._tail(name)}")

    def _end(self) -> list[int]:
        """End everything, and return the ids of the processes that would not."""
        if self._keeper is not None and self._keeper.stdin is not None:
            # The keeper also notices that this process is gone, so an interrupt here does no harm.
            self._keeper.stdin.close()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._keeper.wait(END_TIMEOUT + 10.0)
        end_processes(self.home)  # for the case that the keeper was killed
        for process in self._processes.values():
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(1.0)
        return sorted(processes_of(self.home))

    def _look_up(self, run_id: int) -> FlowerRun:
        answer = self._ask(["ls", "--run-id", str(run_id)], f"flwr ls to describe run {run_id}")
        try:
            (entry,) = answer["runs"]
            details = entry.get("status-details", "")
            return FlowerRun(
                run_id=run_id,
                status=entry["status"],
                details="" if details == "N/A" else details,
            )
        except (KeyError, TypeError, ValueError):
            raise SuperLinkError(f"flwr ls described run {run_id} as {answer}") from None

    def _ask(
        self, arguments: Sequence[str], what: str, timeout: float = COMMAND_TIMEOUT
    ) -> dict[str, Any]:
        """Run a ``flwr`` command and read its answer."""
        text = self._flwr([*arguments, "--format", "json"], what, timeout)
        try:
            answer = json.loads(text)
        except ValueError:
            raise SuperLinkError(f"flwr {arguments[0]} answered no JSON: {text.strip()}") from None
        if not isinstance(answer, dict) or not answer.get("success"):
            reason = answer.get("error-message", answer) if isinstance(answer, dict) else answer
            raise SuperLinkError(f"flwr {arguments[0]}: {reason}{self._tail()}")
        return answer

    def _flwr(
        self,
        arguments: Sequence[str],
        what: str,
        timeout: float,
        echo: Callable[[str], object] | None = None,
    ) -> str:
        """Run a ``flwr`` command within a deadline and return what it printed."""
        try:
            return run_command(
                "flwr", arguments, home=self.home, environ=self.environ, timeout=timeout, echo=echo
            )
        except TimeoutError:
            raise self._overdue(what, timeout) from None
        except CommandError as error:
            raise SuperLinkError(f"{error}{self._tail()}") from None

    def _overdue(self, what: str, timeout: float) -> SuperLinkError:
        return SuperLinkError(f"waited {timeout:.3g} s for {what}{self._tail()}")

    def _tail(self, name: str = _SUPERLINK, lines: int = 30) -> str:
        """Quote the end of a process's log, without the requests it has answered."""
        try:
            with (self.home / f"{name}.log").open(encoding="utf-8", errors="replace") as file:
                last = deque((line for line in file if "[uvicorn.access]" not in line), lines)
            tail = "".join(f"\n    {line.rstrip()}" for line in last)
        except OSError:
            tail = ""
        whose = "the SuperLink's log" if name == _SUPERLINK else f"the log of {name}"
        return f"\n  {whose} ends with:{tail or ' nothing'}"


class LocalSuperLink(SuperLink):
    """Start a SuperLink for simulations. See :class:`SuperLink` for its parameters."""

    def run(
        self,
        app: str | Path,
        *,
        nodes: int = 16,
        cpus_per_client: int = 1,
        gpus_per_client: float = 0.0,
        actors: int | None = None,
        federation: Config | None = None,
        **options: Any,
    ) -> FlowerRun:
        """Run an app to its end. See :meth:`SuperLink.run` for what is not listed here.

        Parameters
        ----------
        app : str or Path
            The folder of the app.
        nodes : int (default: 16)
            The number of virtual nodes.
        cpus_per_client : int (default: 1)
            CPUs of each ClientApp.
        gpus_per_client : float (default: 0.0)
            Share of a GPU of each ClientApp.
        actors : int, optional
            How many ClientApps run at once; by default as many as the CPUs allow. It may be more
            than that.
        """
        chosen: dict[str, Scalar] = {
            "num-supernodes": nodes,
            "client-resources-num-cpus": cpus_per_client,
            "client-resources-num-gpus": float(gpus_per_client),
        }
        if actors is not None:
            chosen["init-args-num-cpus"] = actors * cpus_per_client
        return super().run(app, federation={**chosen, **(federation or {})}, **options)

    def _start(self) -> None:
        self._start_superlink("--insecure", "--simulation", port=free_ports(1)[0])
