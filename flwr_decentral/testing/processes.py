"""What a run's processes use, as Linux tells it."""

from __future__ import annotations

import os
from pathlib import Path

_PROC = Path("/proc")


def family(root: int | None = None) -> dict[int, str]:
    """List a process and its descendants.

    Parameters
    ----------
    root : int, optional
        A process id; this process by default.

    Returns
    -------
    dict of int to str
        The command line of each, by process id, the root first.
    """
    root = os.getpid() if root is None else root
    children: dict[int, list[int]] = {}
    for path in _PROC.glob("[0-9]*/stat"):
        try:
            # The name of the program, in parentheses, may hold anything.
            parent = int(path.read_text().rpartition(")")[2].split()[1])
        except OSError:
            continue  # it has just ended
        children.setdefault(parent, []).append(int(path.parent.name))
    found, queue = {}, [root]
    while queue:
        process = queue.pop()
        try:
            words = (_PROC / str(process) / "cmdline").read_bytes()
        except OSError:
            continue
        found[process] = words.replace(b"\0", b" ").decode(errors="replace").strip()
        queue += children.get(process, [])
    return found


def memory(process: int) -> int:
    """Measure the bytes a process has in memory; what several share is divided among them.

    Zero for a process that has ended.
    """
    try:
        lines = (_PROC / str(process) / "smaps_rollup").read_text().splitlines()
    except OSError:
        return 0
    return next((1024 * int(line.split()[1]) for line in lines if line.startswith("Pss:")), 0)
