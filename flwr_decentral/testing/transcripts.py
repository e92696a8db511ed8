"""Keep what happened as text: digests of transcripts, and comparison with golden files.

The lines themselves are made by :mod:`flwr_decentral.core.transcript`, in every runtime alike.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable
from itertools import zip_longest
from pathlib import Path
from typing import Final

from flwr_decentral.core.transcript import (
    format_command,
    format_event,
    format_step,
    vector_digest,
)

REWRITE: Final = "FLWR_DECENTRAL_REWRITE"
"""Set it to 1, and golden files are written instead of compared with."""

_CONTEXT: Final = 3
_END: Final = "(the end)"

__all__ = [
    "REWRITE",
    "check_golden",
    "digest",
    "first_difference",
    "format_command",
    "format_event",
    "format_step",
    "vector_digest",
]


def digest(lines: Iterable[str]) -> str:
    """Hash a transcript: 16 hexadecimal digits.

    Examples
    --------
    >>> digest(["0 n0 Started up=1"])
    '611f96200c8743de'
    """
    state = hashlib.blake2b(digest_size=8)
    for line in lines:
        state.update(line.encode())
        state.update(b"\n")
    return state.hexdigest()


def first_difference(expected: Iterable[str], actual: Iterable[str]) -> str | None:
    """Describe where two transcripts part, with the lines before.

    Returns
    -------
    str or None
        A few lines to read, or None if the transcripts are equal.

    Examples
    --------
    >>> print(first_difference(["a", "b"], ["a", "c"]))
    line 2 differs
          a
      expected: b
      actual:   c
    """
    before: list[str] = []
    for number, (want, got) in enumerate(zip_longest(expected, actual, fillvalue=_END), 1):
        if want != got:
            context = [f"      {line}" for line in before]
            return "\n".join(
                [
                    f"line {number} differs",
                    *context,
                    f"  expected: {want}",
                    f"  actual:   {got}",
                ]
            )
        before = [*before, want][-_CONTEXT:]
    return None


def check_golden(lines: Iterable[str], path: Path) -> None:
    """Compare a transcript with a golden file, or write the file where that is asked for.

    Parameters
    ----------
    lines : iterable of str
        The transcript.
    path : Path
        The golden file; with ``FLWR_DECENTRAL_REWRITE=1`` in the environment, it is written.

    Raises
    ------
    AssertionError
        If they differ, showing the first difference, or there is no golden file.
    """
    actual = list(lines)
    if os.environ.get(REWRITE) == "1":
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("".join(f"{line}\n" for line in actual), encoding="utf-8")
        return
    advice = f"if that is what should happen now, rewrite it with {REWRITE}=1 and review the diff"
    if not path.exists():
        raise AssertionError(f"there is no golden transcript {path}; {advice}")
    difference = first_difference(path.read_text(encoding="utf-8").splitlines(), actual)
    if difference:
        raise AssertionError(f"{path.name}: {difference}\n{advice}")
