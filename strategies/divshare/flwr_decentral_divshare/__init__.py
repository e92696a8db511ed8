"""DivShare: nodes cut their models into fragments and send each to other nodes, waiting for nobody.

Paper
-----
Biswas, Kermarrec, Marouani, Pires, Sharma, de Vos: *Boosting Asynchronous Decentralized Learning
with Model Fragmentation*, WWW 2025, arXiv:2410.12918. The order of a round is that of the released
code, sacs-epfl/divshare.

A round of node i, after the local training that ends it:

1. *Send.* Whatever is still queued is dropped. The trained model is cut into K fragments. For each
   one, J other nodes are drawn uniformly without replacement, independently of the other fragments.
   The K J messages are queued in a uniformly random order; the link works them off while the node
   goes on.
2. *Aggregate.* Every coordinate becomes the plain average of its own value and of the values that
   came for it: the newest of each (sender, fragment). A coordinate for which none came stays as it
   is, to the bit. What is used is summed in ascending order of (sender, fragment).
3. *Train* from the result.

What is sent is the model *before* the aggregation: an update that was averaged first would leave
its node diluted to 1 / (1 + J).

Nothing is waited for. Fragments of different rounds from one sender lie side by side in the inbox:
a fresh fragment 1, an old fragment 2.

Differences from the paper and its code
---------------------------------------
- The number of fragments K is the parameter, not the fraction Omega = 1 / K: the code's
  ``int(1 / Omega)`` is not K for every Omega that was meant as 1 / K.
- Fragments are a hashed rotation of blocks, without index lists, instead of a permutation of each
  tensor, whose remainders the code gives to the last fragment. ``partition="layerwise"`` is the
  permutation, with the remainders spread.
- The newest fragment is the one with the highest round, not the one that arrived last.
- The code empties its sockets together with its queue by closing them. Here the runtime keeps so
  little in flight that dropping the queue is enough; what a link has started is finished.
- ``max_age`` is ours; the paper uses fragments of any age.
- A topology may be given; a node then draws from its neighbors. The paper's graph is complete.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import ClassVar, Final, Literal

import networkx as nx
import numpy as np
from numpy.typing import NDArray

from flwr_decentral.core import (
    Algorithm,
    Capabilities,
    Command,
    ConfigurationError,
    DropQueued,
    InboxMachine,
    Layerwise,
    Layout,
    Letter,
    Message,
    Partition,
    Received,
    Report,
    Rotation,
    Send,
    Site,
    Started,
    Train,
    TrainDone,
    Wire,
    check_degree,
    check_wire,
    default_granularity,
    suggest,
)
from flwr_decentral.ops.contract import Piece

__all__ = ["DivShare", "DivShareMachine"]

_FRAGMENT: Final = "fragment"
_PARTITIONS: Final = ("rotation", "layerwise")


@dataclass(frozen=True, kw_only=True)
class DivShare(Algorithm):
    """Send fragments of the model to random nodes, in parallel to training.

    Parameters
    ----------
    fragments : int (default: 10)
        K = 1 / Omega, the number of fragments.
    degree : int (default: 6)
        J, the number of receivers of each fragment; at most as many as can be reached.
    granularity : int (default: 0)
        Neighboring coordinates that stay together, a power of two; 0 chooses by the model's size.
        For the rotation only.
    flush : bool (default: True)
        Drop what is still queued when a new round's fragments are ready. Without it the queue of a
        node whose link is slower than its training grows without bound, and so does the age of what
        it sends.
    partition : {"rotation", "layerwise"}
        How fragments are cut.
    partition_seed : int (default: 0)
        What the cut is keyed with; the same for all nodes.
    max_age : int (default: 0)
        Drop received fragments that are more than this many rounds behind this node's own; 0 uses
        them all.
    wire : {"float32", "bfloat16", "float16", "int8"}
        The form in which fragments travel.

    Examples
    --------
    >>> DivShare(fragments=4).parameters["degree"]
    6
    """

    name: ClassVar[str] = "divshare"
    paper: ClassVar[str] = "Biswas et al., WWW 2025, arXiv:2410.12918"
    capabilities: ClassVar[Capabilities] = Capabilities(uses_fragments=True)
    default_topology: ClassVar[str] = "complete"

    fragments: int = 10
    degree: int = 6
    granularity: int = 0
    flush: bool = True
    partition: Literal["rotation", "layerwise"] = "rotation"
    partition_seed: int = 0
    max_age: int = 0
    wire: Wire = "float32"

    def __post_init__(self) -> None:
        check_wire(self.wire)
        least = {"fragments": 1, "degree": 1, "granularity": 0, "partition_seed": 0, "max_age": 0}
        for field, bound in least.items():
            value = getattr(self, field)
            if value < bound:
                raise ConfigurationError(f"{field} must be at least {bound}, got {value}")
        if self.partition not in _PARTITIONS:
            raise ConfigurationError(
                f"divshare has no partition {self.partition!r}; "
                f"{suggest(self.partition, _PARTITIONS)}"
            )
        if self.partition_seed >= 2**64:
            raise ConfigurationError(
                f"partition_seed must be below 2**64, got {self.partition_seed}"
            )
        if self.granularity & (self.granularity - 1):
            raise ConfigurationError(
                f"granularity must be a power of two, or 0 to choose it, got {self.granularity}"
            )

    def check(self, topology: nx.Graph[int], layout: Layout) -> tuple[str, ...]:
        """Refuse more fragments than coordinates; warn where a parameter cannot have its effect."""
        warnings = []
        partition = self.cut(layout)
        empty = sum(not partition.length(fragment) for fragment in range(self.fragments))
        if empty:
            warnings.append(
                f"{empty} of {self.fragments} fragments are empty: a granularity of "
                f"{self.granularity} is too coarse for {layout.size} parameters; "
                f"{default_granularity(layout.size, self.fragments)} would do"
            )
        return (*warnings, *check_degree(self.degree, topology, "each fragment"))

    def cut(self, layout: Layout) -> Partition:
        """Partition the flat vector of a layout, the same for every node."""
        return _cut(self, layout)

    def machine(self, site: Site) -> DivShareMachine:
        """Make the machine of one node."""
        return DivShareMachine(site, self)


@lru_cache(maxsize=8)
def _cut(algorithm: DivShare, layout: Layout) -> Partition:
    # Cached, so that all nodes of a process share one: index lists are larger than the model.
    if algorithm.partition == "layerwise":
        tensors = [tensor.length for tensor in layout.tensors if tensor.role == "shared"]
        return Layerwise(tensors, algorithm.fragments, algorithm.partition_seed)
    granularity = algorithm.granularity or default_granularity(layout.size, algorithm.fragments)
    return Rotation(layout.size, algorithm.fragments, granularity, algorithm.partition_seed)


class DivShareMachine(InboxMachine):
    """One node of :class:`DivShare`.

    Attributes
    ----------
    peers, queue : numpy.random.Generator
        Whom to send to, and in which order.
    """

    STATE = (*InboxMachine.STATE, "peers", "queue")

    def __init__(self, site: Site, algorithm: DivShare) -> None:
        super().__init__(site, algorithm.wire)
        self.algorithm = algorithm
        self.partition = algorithm.cut(site.layout)
        self.peers = site.seeds.generator("peers")
        self.queue = site.seeds.generator("queue")

    def on_started(self, event: Started) -> Iterable[Command]:
        """Begin round 1."""
        yield Train(round=1, model=self.model)

    def on_train_done(self, event: TrainDone) -> Iterator[Command]:
        """Send the trained model in fragments, average it with the inbox, and train on."""
        if self.algorithm.flush:
            yield DropQueued()
        yield from self._sends(event)
        yield from self._aggregate(event)
        yield Train(round=event.round + 1, model=self.model)

    def on_received(self, event: Received) -> Iterator[Command]:
        """Keep a fragment until the next aggregation, if none newer is there."""
        letter = self._read(event)
        if letter is None:
            yield Report(name="bad-fragment", nbytes=event.message.nbytes)
            return
        yield from self.keep(letter)

    def _sends(self, event: TrainDone) -> Iterator[Send]:
        candidates = np.array(sorted(self.up), dtype=np.int64)
        fragments, copies = self.algorithm.fragments, min(self.algorithm.degree, len(candidates))
        if not copies:
            return
        messages = [
            Message(
                kind=_FRAGMENT,
                step=event.round,
                payload=self.on_wire(payload),
                header={"fragment": fragment, "fragments": fragments},
                wire=self.wire,
            )
            for fragment, payload in enumerate(self.site.ops.pack_all(event.after, self.partition))
        ]
        receivers = candidates[_draw(self.peers, len(candidates), fragments, copies)]
        for place in self.queue.permutation(fragments * copies).tolist():
            fragment, copy = divmod(place, copies)
            yield Send(to=int(receivers[fragment, copy]), message=messages[fragment])

    def _aggregate(self, event: TrainDone) -> Iterator[Report]:
        ages = [(event.round - letter.step, letter) for letter in self.inbox.drain()]
        limit = self.algorithm.max_age
        old = [letter for age, letter in ages if limit and age > limit]
        if old:
            nbytes = sum(letter.nbytes for letter in old)
            yield Report(name="expired", count=len(old), nbytes=nbytes)
            ages = [(age, letter) for age, letter in ages if age <= limit]
        self.model = event.after
        if ages:
            pieces = [Piece(letter.slot, letter.payload) for _, letter in ages]
            self.model = self.site.ops.average(event.after, self.partition, pieces)
            total = sum(age for age, _ in ages)
            yield Report(name="staleness", count=len(ages), total=float(total))

    def _read(self, event: Received) -> Letter | None:
        """Take a fragment out of a message; None if it is not one of this partition."""
        message = event.message
        fragment, payload = message.header.get("fragment"), message.payload
        if (
            message.kind != _FRAGMENT
            or payload is None
            or message.header.get("fragments") != self.algorithm.fragments
            or not isinstance(fragment, int)
            or not 0 <= fragment < self.algorithm.fragments
            or len(payload) != self.partition.length(fragment)
        ):
            return None
        return Letter(event.source, fragment, message.step, payload, message.wire)


def _draw(
    generator: np.random.Generator, population: int, rows: int, count: int
) -> NDArray[np.int64]:
    """Draw, for each row, a uniform set of ``count`` different numbers below ``population``.

    Floyd's algorithm on all rows at once: each step draws from one number more than the last, and
    takes that one where the row has the drawn number already.
    """
    drawn = np.empty((rows, count), dtype=np.int64)
    for column, last in enumerate(range(population - count, population)):
        number = generator.integers(last + 1, size=rows)
        taken = (drawn[:, :column] == number[:, None]).any(axis=1)
        drawn[:, column] = np.where(taken, last, number)
    return drawn
