"""The processes of a folder, and a keeper that ends them whatever becomes of who started them.

Flower and Ray start processes in sessions of their own, so no process group holds them all. They
are found by the folder: it is their ``FLWR_HOME``, or they work in it, or a parent of theirs does.
The keeper is a process that hears of the end of the one that started it by the end of its standard
input. It runs this file by itself, so only the standard library is imported here.
"""

# ruff: noqa: TID251 - processes, signals and deadlines are what this is about

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Final

END_TIMEOUT: Final = 15.0
"""Seconds for all processes to end; those that have not after a third of it are killed."""


def processes_of(home: Path) -> set[int]:
    """Find the processes that were started in ``home`` or with it as their ``FLWR_HOME``.

    Ray writes its workers' titles over the environment that ``/proc`` shows. Each process has the
    working directory, or the environment, or a parent that has one of the two.
    """
    marker = b"\0FLWR_HOME=%s\0" % os.fsencode(home)
    parents: dict[int, int] = {}
    found = set()
    for folder in Path("/proc").iterdir():
        if not folder.name.isdigit():
            continue
        pid = int(folder.name)
        try:
            # The second field is a name in parentheses, which may hold anything.
            state, parent = (folder / "stat").read_text().rpartition(")")[2].split()[:2]
            if state in "ZX":
                continue
            parents[pid] = int(parent)
            environ = b"\0%s\0" % (folder / "environ").read_bytes()
            if marker in environ or home in (cwd := (folder / "cwd").readlink(), *cwd.parents):
                found.add(pid)
        except (OSError, ValueError):
            continue  # it has just ended, or is another user's
    while more := {pid for pid, parent in parents.items() if parent in found} - found:
        found |= more
    return found - {os.getpid()}


def end_processes(home: Path, timeout: float = END_TIMEOUT) -> None:
    """End every process of ``home``: politely, then not."""
    start = time.monotonic()
    asked: set[int] = set()
    while (left := processes_of(home)) and (spent := time.monotonic() - start) < timeout:
        if spent < timeout / 3:
            _signal(left - asked, signal.SIGTERM)
            asked |= left
        else:
            _signal(left, signal.SIGKILL)
        time.sleep(0.1)


def start_keeper(home: Path, *, keep: bool) -> subprocess.Popen[bytes]:
    """Start the process that ends all others, when it is told to or when this one is gone.

    It hears of both by the end of its standard input, in a session that no Ctrl-C reaches. Then it
    removes the folder, unless that is to be kept.
    """
    return subprocess.Popen(
        [sys.executable, "-I", "-S", __file__, str(home), "keep" if keep else "remove"],
        cwd="/",
        env={},
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        start_new_session=True,
    )


def _signal(pids: set[int], number: signal.Signals) -> None:
    for pid in pids:
        try:
            os.kill(pid, number)
        except ProcessLookupError:
            continue


def _keep_watch(home: str, then: str) -> None:
    sys.stdin.buffer.read()
    end_processes(Path(home))
    if then == "remove":
        shutil.rmtree(home, ignore_errors=True)


if __name__ == "__main__":
    _keep_watch(*sys.argv[1:])
