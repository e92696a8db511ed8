"""What an algorithm is.

An :class:`Algorithm` is a frozen set of hyper-parameters. Given a :class:`Site`, it makes a
:class:`Machine`: the running state of the algorithm on one node. A machine is a function of what
happened. It owns no socket, clock, thread, logger or global dice, and

    commands = machine.step(event)

is all there is to it: the same state and the same event give the same commands. A runtime steps a
machine once, carries out every command, and then looks for the next event. The virtual-time runtime
and the sidecar are two such runtimes, and no algorithm knows which of them it runs in.

A complete algorithm, which averages with whatever arrived:

>>> from dataclasses import dataclass
>>> from flwr_decentral.core import (
...     Algorithm, Machine, Message, Received, Send, Site, Started, Train, TrainDone)
>>> @dataclass(frozen=True, kw_only=True)
... class Gossip(Algorithm):
...     # send the model to every neighbor, average with what they sent
...     name = "gossip"
...     def machine(self, site):
...         return GossipMachine(site)
>>> class GossipMachine(Machine):
...     STATE = ("model", "round", "inbox")
...     def __init__(self, site):
...         super().__init__(site)
...         self.round, self.inbox = 1, {}
...     def on_started(self, event):
...         yield Train(round=self.round, model=self.model)
...     def on_train_done(self, event):
...         x = event.after
...         for peer in sorted(self.up):
...             yield Send(to=peer, message=Message(kind="model", step=event.round, payload=x))
...         vectors = [x, *(self.inbox[j] for j in sorted(self.inbox))]
...         self.model = self.site.ops.combine(vectors, [1 / len(vectors)] * len(vectors))
...         self.inbox, self.round = {}, event.round + 1
...         yield Train(round=self.round, model=self.model)
...     def on_received(self, event):
...         self.inbox[event.source] = event.message.payload
...         return ()
"""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Final, TypeAlias

import networkx as nx

from .commands import Command, Report
from .events import (
    Event,
    LinkIdle,
    PeerDown,
    PeerUp,
    Received,
    Started,
    Stopped,
    TimerFired,
    TrainDone,
    TrainFailed,
)
from .layout import Layout
from .message import Vector
from .seeds import NodeSeeds
from .state import take_up, write_down
from .wire import Wire

if TYPE_CHECKING:
    from flwr_decentral.ops.contract import Ops

Topology: TypeAlias = "nx.Graph[int]"
"""An undirected, simple, frozen graph on the nodes 0 to n-1."""


@dataclass(frozen=True, kw_only=True)
class Capabilities:
    """What an algorithm needs and does, for listings, checks and runtimes.

    Attributes
    ----------
    synchronous : bool (default: False)
        A node waits for its neighbors' step before it goes on.
    pairwise : bool (default: False)
        Exchanges are between two nodes at a time.
    needs_tree : bool (default: False)
        The topology must be a tree.
    uses_fragments : bool (default: False)
        Messages carry parts of the model.
    communicates : bool (default: True)
        Nodes send anything at all.
    link_idle : bool (default: False)
        Machines want :class:`~flwr_decentral.core.events.LinkIdle` events.
    """

    synchronous: bool = False
    pairwise: bool = False
    needs_tree: bool = False
    uses_fragments: bool = False
    communicates: bool = True
    link_idle: bool = False


@dataclass(frozen=True, kw_only=True)
class Site:
    """Where a machine runs: everything that is fixed for it during a run.

    Attributes
    ----------
    node : int
        This node's index.
    topology : networkx.Graph
        The whole graph, on nodes 0 to n-1, frozen.
    layout : Layout
        How the model's tensors lie in a flat vector.
    initial : ndarray of float32, shape (layout.size,)
        The common initial model; read-only.
    seeds : NodeSeeds
        This node's random streams.
    ops : Ops
        The vector arithmetic. A machine does all its arithmetic through it.
    """

    node: int
    topology: Topology
    layout: Layout
    initial: Vector
    seeds: NodeSeeds
    ops: Ops

    @property
    def size(self) -> int:
        """The number of nodes, n."""
        return len(self.topology)

    @property
    def neighbors(self) -> tuple[int, ...]:
        """The neighbors of this node, ascending."""
        return tuple(sorted(self.topology[self.node]))


@dataclass(frozen=True, kw_only=True)
class Algorithm(ABC):
    """Hyper-parameters of an algorithm: frozen, printable, comparable, checked when made.

    A subclass is a frozen, keyword-only dataclass. Its fields are the hyper-parameters, of type
    bool, int, float, str or None. It raises
    :class:`~flwr_decentral.core.errors.ConfigurationError` from ``__post_init__`` for values that
    can never be right, and from :meth:`check` for values that do not fit a topology or a model.

    What the class declares holds for its default hyper-parameters. An instance may have
    ``capabilities`` and a ``default_topology`` of its own.
    """

    name: ClassVar[str]
    paper: ClassVar[str] = ""
    capabilities: ClassVar[Capabilities] = Capabilities()
    default_topology: ClassVar[str] = "ring"

    def check(self, topology: Topology, layout: Layout) -> tuple[str, ...]:
        """Refuse a topology or a layout that the algorithm cannot run on.

        Returns
        -------
        tuple of str
            Warnings: things that work, but probably not as the user thinks.

        Raises
        ------
        ConfigurationError
            If it cannot work.
        """
        del topology, layout
        return ()

    @abstractmethod
    def machine(self, site: Site) -> Machine:
        """Make the machine of one node."""

    @property
    def parameters(self) -> dict[str, bool | int | float | str | None]:
        """The hyper-parameters by name."""
        return {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}

    def __str__(self) -> str:
        return f"{self.name}({', '.join(f'{k}={v!r}' for k, v in self.parameters.items())})"


class Machine(ABC):
    """The running state of an algorithm on one node.

    A subclass implements the ``on_...`` methods that it needs. Each returns or yields commands. It
    lists the names of its changing attributes in ``STATE``. Their values are numbers, strings,
    arrays, tuples, lists, dicts and sets of these, generators, mailboxes or other parts (see
    :mod:`flwr_decentral.core.state`), so that they can be saved without pickle.

    Messages whose payload is not finite, or that come from a node that is not a neighbor, never
    reach :meth:`on_received`: they are counted. :meth:`on_rejected` is told of the former.

    Attributes
    ----------
    site : Site
        What is fixed.
    model : ndarray of float32, shape (layout.size,)
        The node's current model, the one to evaluate.
    up : set of int
        The neighbors that can be reached now.
    wire : {"float32", "bfloat16", "float16", "int8"}
        The form in which this machine's payloads travel.
    """

    STATE: ClassVar[tuple[str, ...]] = ("model",)

    def __init__(self, site: Site, wire: Wire = "float32") -> None:
        self.site = site
        self.model: Vector = site.initial
        self.up: set[int] = set()
        self.wire = wire
        self._rounded: tuple[Vector, Vector] | None = None

    def step(self, event: Event) -> list[Command]:
        """Let one thing happen to the node.

        Parameters
        ----------
        event : Event
            What happened.

        Returns
        -------
        list of Command
            What to do about it, in order.
        """
        match event:
            case Received():
                payload, nbytes = event.message.payload, event.message.nbytes
                if not self.site.topology.has_edge(self.site.node, event.source):
                    return [Report(name="message-of-a-stranger", nbytes=nbytes)]
                if payload is not None and not self.site.ops.finite(payload):
                    wasted = Report(name="payload-not-finite", nbytes=nbytes)
                    return [wasted, *self.on_rejected(event)]
            case Started():
                self.up = set(event.up)
            case PeerUp():
                self.up.add(event.peer)
            case PeerDown():
                self.up.discard(event.peer)
        return list(_HANDLERS[type(event)](self, event))

    def on_wire(self, vector: Vector) -> Vector:
        """Round a vector to what its receivers will read.

        Everything that a machine sends goes through here, and its message says ``wire=self.wire``.
        For float32 the vector comes back as it is. The last result is kept, so that one vector that
        goes to several neighbors is one payload.
        """
        if self.wire == "float32":
            return vector
        if self._rounded is None or self._rounded[0] is not vector:
            self._rounded = vector, self.site.ops.rounded(vector, self.wire)
        return self._rounded[1]

    @property
    def waits_for(self) -> tuple[int, ...]:
        """The neighbors without whose message this node does not go on, ascending."""
        return ()

    def on_started(self, event: Started) -> Iterable[Command]:
        """Begin."""
        del event
        return ()

    @abstractmethod
    def on_train_done(self, event: TrainDone) -> Iterable[Command]:
        """Take in a trained vector."""

    def on_train_failed(self, event: TrainFailed) -> Iterable[Command]:
        """Go on after a failure: by default as if zero local steps had been taken."""
        # A machine may write to `after`, so it cannot be the model itself.
        after = self.site.ops.combine([self.model], [1.0])
        return self.on_train_done(
            TrainDone(at=event.at, round=event.round, before=self.model, after=after)
        )

    def on_received(self, event: Received) -> Iterable[Command]:
        """Take in a message."""
        del event
        return ()

    def on_rejected(self, event: Received) -> Iterable[Command]:
        """Learn that a neighbor sent something unusable; by default it is as good as lost."""
        del event
        return ()

    def on_timer(self, event: TimerFired) -> Iterable[Command]:
        """Wake up."""
        del event
        return ()

    def on_link_idle(self, event: LinkIdle) -> Iterable[Command]:
        """Fill the outbox."""
        del event
        return ()

    def on_peer_up(self, event: PeerUp) -> Iterable[Command]:
        """Send again what a returning neighbor needs."""
        del event
        return ()

    def on_peer_down(self, event: PeerDown) -> Iterable[Command]:
        """Stop waiting for a neighbor that has gone."""
        del event
        return ()

    def on_stopped(self, event: Stopped) -> Iterable[Command]:
        """End."""
        del event
        return ()

    def snapshot(self) -> dict[str, Any]:
        """Copy the whole state, as plain values and arrays."""
        return write_down(self, ("up", *self.STATE))

    def restore(self, snapshot: Mapping[str, Any]) -> None:
        """Become what :meth:`snapshot` of a machine for the same site has described.

        Raises
        ------
        AlgorithmError
            If the snapshot was taken of another kind of machine.
        """
        take_up(self, ("up", *self.STATE), snapshot)


_HANDLERS: Final[Mapping[type, Callable[[Any, Any], Iterable[Command]]]] = {
    Started: lambda machine, event: machine.on_started(event),
    TrainDone: lambda machine, event: machine.on_train_done(event),
    TrainFailed: lambda machine, event: machine.on_train_failed(event),
    Received: lambda machine, event: machine.on_received(event),
    TimerFired: lambda machine, event: machine.on_timer(event),
    LinkIdle: lambda machine, event: machine.on_link_idle(event),
    PeerUp: lambda machine, event: machine.on_peer_up(event),
    PeerDown: lambda machine, event: machine.on_peer_down(event),
    Stopped: lambda machine, event: machine.on_stopped(event),
}
