"""One independent random stream for each (run seed, node index, purpose).

A stream is a counter-based Philox generator whose 128-bit key is the BLAKE2b hash of the three, so
that streams do not overlap, do not depend on the order in which they are asked for, and are the
same in every process. Nothing here touches a global generator.

Purposes in use: ``"peers"`` (whom to send to), ``"queue"`` (order of sending), ``"turns"`` (when to
start an exchange), ``"loss"`` (lost messages), ``"stragglers"`` (which nodes are slow), ``"train"``
(the seed a trainer gets for a round), ``"topology"`` and ``"evaluate"``.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import numpy as np

RUN = -1
"""The node index under which streams that belong to the whole run are drawn."""


def _hash(size: int, *parts: object) -> bytes:
    text = "\x1f".join(map(str, parts)).encode()
    return hashlib.blake2b(text, digest_size=size, person=b"flwr-decentral").digest()


@dataclass(frozen=True)
class Seeds:
    """Derive the random streams of one run.

    Parameters
    ----------
    run : int
        The run seed: the same seed gives the same streams, whatever else differs.

    Examples
    --------
    >>> a = Seeds(7).generator(3, "peers").integers(1000, size=4)
    >>> b = Seeds(7).generator(3, "peers").integers(1000, size=4)
    >>> bool((a == b).all())
    True
    """

    run: int

    def generator(self, node: int, purpose: str) -> np.random.Generator:
        """Start the stream of a node for a purpose, from its beginning.

        Parameters
        ----------
        node : int
            Node index, or :data:`RUN` for a stream of the whole run.
        purpose : str
            What the numbers are for; another purpose is another, independent stream.

        Returns
        -------
        numpy.random.Generator
            A generator of its own, with a Philox bit generator.
        """
        key = int.from_bytes(_hash(16, self.run, node, purpose), "little")
        return np.random.Generator(np.random.Philox(key=key))

    def number(self, node: int, purpose: str, counter: int) -> int:
        """Draw the ``counter``-th seed of a purpose, in [0, 2**31), without any state.

        31 bits, so that it is a valid seed for numpy, for torch and for a Flower record alike.
        """
        return int.from_bytes(_hash(4, self.run, node, purpose, counter), "little") >> 1

    def of(self, node: int) -> NodeSeeds:
        """Restrict these seeds to one node."""
        return NodeSeeds(self, node)


@dataclass(frozen=True)
class NodeSeeds:
    """The streams that one node may draw from."""

    seeds: Seeds
    node: int

    def generator(self, purpose: str) -> np.random.Generator:
        """Start this node's stream for a purpose. See :meth:`Seeds.generator`."""
        return self.seeds.generator(self.node, purpose)

    def number(self, purpose: str, counter: int) -> int:
        """Draw one of this node's seeds. See :meth:`Seeds.number`."""
        return self.seeds.number(self.node, purpose, counter)
