"""Link state: what every node knows of all links, so that all of them draw the same conclusions.

A machine is told of its own links alone. Where nodes have to agree on more, such as on the trees
that their sums travel along, each one *claims* what has become of its links, and claims are passed
on from neighbor to neighbor:

======================  ========================================================================
a claim                 "link j of node i is up (or down)", with a version that i counts up
a link is up            if neither of its ends claims that it is down; at first nobody does
newer than what I know  believe it, and pass it on to all neighbors
anything else           is old news and goes no further
about my own link       if it is not true, a former self of mine has claimed it: outbid it
======================  ========================================================================

Of two claims of one version the one that says "down" wins, so that the order in which claims arrive
does not matter. All claims together are a *view*. Its number is a hash of them: nodes with the
same number know the same, and no set of claims is ever seen twice while a run goes on. Claims can
be lost, so nodes that find that their numbers differ send each other all that they know.

Nothing is sent while nothing happens.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar, Final, NamedTuple

import networkx as nx

from .message import Message
from .state import Part

CLAIM: Final = "link"
"""The kind of a message that carries a claim."""

_FIRST: Final = (0, True)


class Claim(NamedTuple):
    """What a node says of a link of its own."""

    node: int
    peer: int
    version: int
    up: bool

    def message(self, step: int) -> Message:
        """Write it down as a message without a payload."""
        return Message(kind=CLAIM, step=step, header={**self._asdict(), "up": int(self.up)})


class LinkState(Part):
    """What one node knows of all links of a topology.

    Parameters
    ----------
    node : int
        Whose knowledge it is.
    topology : networkx.Graph
        All links that there may be.

    Attributes
    ----------
    claims : dict of (int, int) to (int, bool)
        The newest claim of each (node, peer): its version, and whether the link is up. Links that
        were never claimed to be down are not listed.
    """

    STATE: ClassVar[tuple[str, ...]] = ("claims",)

    def __init__(self, node: int, topology: nx.Graph[int]) -> None:
        self.node, self.topology = node, topology
        self.claims: dict[tuple[int, int], tuple[int, bool]] = {}
        self._view: int | None = None

    def __iter__(self) -> Iterator[Claim]:
        """List all claims, by node and peer."""
        return (Claim(*key, *self.claims[key]) for key in sorted(self.claims))

    def see(self, peer: int, *, up: bool) -> Claim | None:
        """Claim what has become of a link of this node; None if that is known."""
        version, was = self.claims.get((self.node, peer), _FIRST)
        return None if up == was else self._note(Claim(self.node, peer, version + 1, up))

    def hear(self, claim: Claim) -> Claim | None:
        """Take in a claim.

        Returns
        -------
        Claim or None
            What is to be told to all neighbors: the claim or, if it is about a link of this node
            and not true, one that outbids it. None if it is old news.
        """
        version, up = self.claims.get(claim[:2], _FIRST)
        mine = claim.node == self.node
        if mine and claim.up != up and claim.version >= version:
            return self._note(claim._replace(version=claim.version + 1, up=up))
        if (claim.version, not claim.up) <= (version, not up):
            return None
        return self._note(claim)

    def read(self, message: Message) -> Claim | None:
        """Take a claim out of a message; None if there is none about a link of the topology."""
        node, peer, version, up = (message.header.get(name) for name in Claim._fields)
        if not (isinstance(node, int) and isinstance(peer, int)):
            return None
        if not isinstance(version, int) or version < 1 or up not in (0, 1):
            return None
        return Claim(node, peer, version, bool(up)) if self.topology.has_edge(node, peer) else None

    @property
    def view(self) -> int:
        """A hash of all claims, of 63 bits; 0 if there are none."""
        if self._view is None:  # not with each of many claims that come together
            content = b"".join(struct.pack("<QQQ?", *each) for each in self)
            digest = hashlib.blake2b(content, digest_size=8, person=b"flwr-links").digest()
            self._view = int.from_bytes(digest, "little") >> 1 if content else 0
        return self._view

    @property
    def down(self) -> frozenset[tuple[int, int]]:
        """The links that either end claims to be down, each as (lower, higher)."""
        return frozenset((min(key), max(key)) for key, (_, up) in self.claims.items() if not up)

    @property
    def edges(self) -> frozenset[tuple[int, int]]:
        """The links that are up, each as (lower, higher)."""
        return frozenset((min(edge), max(edge)) for edge in self.topology.edges) - self.down

    def works(self, a: int, b: int) -> bool:
        """Tell whether there is a link between two nodes, and it is up."""
        ends = (self.claims.get(key, _FIRST) for key in ((a, b), (b, a)))
        return self.topology.has_edge(a, b) and all(up for _, up in ends)

    def restore(self, snapshot: Mapping[str, Any]) -> None:
        """Become what :meth:`snapshot` has described."""
        super().restore(snapshot)
        self._view = None

    def _note(self, claim: Claim) -> Claim:
        self.claims[claim.node, claim.peer] = (claim.version, claim.up)
        self._view = None
        return claim
