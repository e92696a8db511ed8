"""Flower's commands: where they are, how they are run within a deadline, and what they are given.

The standard library only is imported here.
"""

# ruff: noqa: TID251 - commands are processes, with deadlines

from __future__ import annotations

import json
import math
import ssl
import subprocess
import sys
import tempfile
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO, TypeAlias, cast

Scalar: TypeAlias = bool | int | float | str
Config: TypeAlias = Mapping[str, Scalar]
"""What Flower's command line takes; dotted keys for tables."""


class CommandError(RuntimeError):
    """Report a command that failed, with what it said."""


def executable(name: str) -> Path:
    """Find a command of this environment, which need not be on the path."""
    return Path(sys.executable).parent / name


def run_command(
    name: str,
    arguments: Sequence[str],
    *,
    home: Path,
    environ: Mapping[str, str],
    timeout: float,
    echo: Callable[[str], object] | None = None,
) -> str:
    """Run a command of this environment, and return what it printed.

    Parameters
    ----------
    name : str
        The command.
    arguments : sequence of str
        Its arguments, of which errors name the first.
    home : Path
        Where it works.
    environ : mapping of str to str
        All of its environment.
    timeout : float
        Seconds until it is killed.
    echo : callable, optional
        Called with each line, while it runs.

    Raises
    ------
    TimeoutError
        If it took longer.
    CommandError
        If it failed.
    """
    overdue = threading.Event()
    with tempfile.TemporaryFile() as errors:
        process = subprocess.Popen(
            [str(executable(name)), *arguments],
            cwd=home,
            env=environ,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=errors,
            start_new_session=True,
        )

        def give_up() -> None:
            overdue.set()
            process.kill()

        timer = threading.Timer(timeout, give_up)
        timer.daemon = True
        timer.start()
        try:
            with cast(IO[bytes], process.stdout) as output:
                text = _read(output, echo)
            code = process.wait()
        finally:
            timer.cancel()
            process.kill()
            process.wait()
        if overdue.is_set():
            raise TimeoutError
        if code:
            errors.seek(0)
            said = errors.read().decode(errors="replace").strip() or text.strip()
            raise CommandError(f"{name} {arguments[0]} ended with exit code {code}: {said}")
    return text


def answers(url: str, ca: Path | None) -> bool:
    """Tell whether a server of this machine answers a request, with a certificate of the CA."""
    # A proxy that the user has set knows nothing of this machine's ports.
    handlers: list[urllib.request.BaseHandler] = [urllib.request.ProxyHandler({})]
    if ca is not None:
        context = ssl.create_default_context(cafile=ca)
        handlers.append(urllib.request.HTTPSHandler(context=context))
    opener = urllib.request.build_opener(*handlers)
    try:
        with opener.open(url, timeout=1.0) as response:
            return bool(response.status == 200)
    except (OSError, urllib.error.URLError):
        return False


def write_toml(values: Config, folder: str, name: str) -> str:
    """Write values to a TOML file, whose strings are those of JSON."""
    path = Path(folder) / f"{name}.toml"
    lines = []
    for key, value in values.items():
        if not isinstance(value, bool | int | float | str):
            raise TypeError(
                f"{key}: Flower takes bool, int, float and str, got {type(value).__name__}"
            )
        if isinstance(value, float) and not math.isfinite(value):
            raise ValueError(f"{key}: Flower takes finite numbers, got {value}")
        lines.append(f"{key} = {json.dumps(value, ensure_ascii=False)}\n")
    path.write_text("".join(lines), encoding="utf-8")
    return str(path)


def _read(stream: IO[bytes], echo: Callable[[str], object] | None) -> str:
    lines = []
    for raw in stream:
        line = raw.decode(errors="replace")
        lines.append(line)
        if echo is not None:
            echo(line.rstrip("\r\n"))
    return "".join(lines)
