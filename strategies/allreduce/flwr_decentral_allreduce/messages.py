"""What nodes say to each other.

All messages are of one round, which ``step`` names:

========  ==============================================================================
sum       to the parent: what this node and those below it have trained, of one chunk
mean      to the children: what the owner made of it
ask       to the parent, for a mean: it has not come, and my sum is out
have      in answer: that mean is out (it was sent before, so it is lost if it is not there)
want      in answer: send that sum, or that mean, again
view      this is the round that I am at, and what I know of the links, as a number
link      a claim about a link, see :mod:`flwr_decentral.core.linkstate`
========  ==============================================================================
"""

from __future__ import annotations

from typing import Final

from flwr_decentral.core import Contiguous, Message, Send, Vector

SUM: Final = "sum"
MEAN: Final = "mean"
ASK: Final = "ask"
HAVE: Final = "have"
WANT: Final = "want"
VIEW: Final = "view"


def values(
    to: int, kind: str, *, chunk: int, step: int, view: int, count: int, payload: Vector | None
) -> Send:
    """Write a sum or a mean of so many models."""
    header = {"chunk": chunk, "count": count, "view": view}
    return Send(to=to, message=Message(kind=kind, step=step, payload=payload, header=header))


def note(to: int, kind: str, *, step: int, view: int, chunk: int | None = None) -> Send:
    """Write one of the others."""
    header = {"view": view} if chunk is None else {"view": view, "chunk": chunk}
    return Send(to=to, message=Message(kind=kind, step=step, header=header))


def fits(message: Message, partition: Contiguous) -> bool:
    """Tell whether a message, other than a claim, is complete."""
    chunk, count = message.header.get("chunk"), message.header.get("count")
    if not isinstance(message.header.get("view"), int):
        return False
    if message.kind == VIEW:
        return True
    if not isinstance(chunk, int) or not 0 <= chunk < partition.fragments:
        return False
    if message.kind in (ASK, HAVE, WANT):
        return True
    if message.kind not in (SUM, MEAN) or not isinstance(count, int) or count < 0:
        return False
    if message.payload is None:
        return message.kind == SUM and count == 0
    return len(message.payload) == partition.length(chunk)
