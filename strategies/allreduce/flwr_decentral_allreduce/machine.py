"""The running state of a node.

Messages, all of one round, which ``step`` names:

========  ==============================================================================
sum       to the parent: what this node and those below it have trained, of one chunk
mean      to the children: what the owner made of it
ask       to the parent, for a mean: it has not come, and my sum is out
have      in answer: that mean is out (it was sent before, so it is lost if it is not there)
want      in answer: send that sum, or that mean, again
view      this is the round that I am at, and what I know of the links, as a number
link      a claim about a link, see :mod:`flwr_decentral.core.linkstate`
========  ==============================================================================

The rules:

* *A sum belongs to a view.* Nodes with the same view have the same trees, so no model is in a sum
  twice. When a node's view changes, it forgets all sums, waits for an eighth of ``retry`` in case
  there is more news, and begins the round's exchange anew, with the model that it has trained.
* *A mean is final.* A node that has a chunk's mean passes it on, where it would send a sum. One
  that has gone on to the next round has the means of the last one in its model. So all nodes in
  reach of one another end a round with the same bits, whoever left in its midst.
* *Nothing is sent twice unless it is lost.* Only numbers are repeated: after ``retry`` seconds, and
  half as often each time down to a sixteenth, until something comes. Links keep the order, so
  ``have`` overtakes no mean.
* *A node that hears of a round two or more ahead has been away.* It takes the means of the last
  round from who told it, in place of its own model, and trains on with all others.
* *A node whose training was for nothing* (it is not finite) adds nothing to the sums.
* *Where nothing has come for* ``patience`` *seconds*, a node goes on with its own values in the
  chunks whose mean it lacks, and passes those on to nobody.
"""

from __future__ import annotations

from bisect import bisect
from collections.abc import Iterator
from functools import cached_property
from typing import Final

from flwr_decentral.core import (
    Command,
    Contiguous,
    Machine,
    Message,
    PeerDown,
    PeerUp,
    Received,
    Report,
    Send,
    SetTimer,
    Site,
    Started,
    TimerFired,
    Train,
    TrainDone,
    Vector,
    from_seconds,
)
from flwr_decentral.core.linkstate import CLAIM, Claim, LinkState

from .routes import OWNER, Forest, forests

SUM: Final = "sum"
MEAN: Final = "mean"
ASK: Final = "ask"
HAVE: Final = "have"
WANT: Final = "want"
VIEW: Final = "view"

RETRY: Final = "retry"
PATIENCE: Final = "patience"
SETTLE: Final = "settle"


class AllReduceMachine(Machine):
    """One node of :class:`~flwr_decentral_allreduce.AllReduce`.

    Parameters
    ----------
    site : Site
        Where it runs.
    partition : Contiguous
        The chunks.
    retry, patience : float
        In seconds.

    Attributes
    ----------
    links : LinkState
        What this node knows of all links.
    round : int
        The round of the current training and the exchange after it.
    training : bool
        The trainer is at work.
    own : ndarray of float32, shape (layout.size,), optional
        What this node adds to the sums.
    away : bool
        This node takes the means of its round over, and adds nothing.
    settling : bool
        The view has changed, and may change again at once.
    sums, ahead : dict
        (count, values or None) by (chunk, child): what came for this round and for the next.
    means : dict
        (count, values) by chunk.
    sent : set of int
        The chunks whose sum is out.
    unsure : set of int
        The chunks of the model that are not the mean of the last round.
    present : int
        How many models the last round's means are of.
    heard_at : int
        When the last sum or mean came that was of use.
    interval : int
        Nanoseconds from the last timer of retries to the next; 0 if none is set.
    """

    STATE = (
        *Machine.STATE,
        "links",
        "round",
        "training",
        "own",
        "away",
        "settling",
        "sums",
        "ahead",
        "means",
        "sent",
        "unsure",
        "present",
        "heard_at",
        "interval",
    )

    def __init__(self, site: Site, partition: Contiguous, *, retry: float, patience: float) -> None:
        super().__init__(site)
        self.partition = partition
        self.retry, self.patience = from_seconds(retry), from_seconds(patience)
        self.links = LinkState(site.node, site.topology)
        self.round = 1
        self.training = self.away = self.settling = False
        self.own: Vector | None = None
        self.sums: dict[tuple[int, int], tuple[int, Vector | None]] = {}
        self.ahead: dict[tuple[int, int], tuple[int, Vector | None]] = {}
        self.means: dict[int, tuple[int, Vector]] = {}
        self.sent: set[int] = set()
        self.unsure: set[int] = set()
        self.present = site.size
        self.heard_at = self.interval = 0

    # What the view says.

    @cached_property
    def _known(self) -> dict[int, tuple[Forest, ...]]:
        return {}

    @property
    def _forests(self) -> tuple[Forest, ...]:
        view = self.links.view
        if view not in self._known:
            self._known.clear()
            edges = self.links.edges
            self._known[view] = forests(self.site.size, edges, self.partition.fragments)
        return self._known[view]

    def _parent(self, chunk: int) -> int:
        return self._forests[chunk].parents[self.site.node]

    def _children(self, chunk: int) -> tuple[int, ...]:
        return self._forests[chunk].children[self.site.node]

    @property
    def _missing(self) -> list[int]:
        return [c for c in range(self.partition.fragments) if c not in self.means]

    def _awaited(self, chunk: int) -> list[int]:
        """List the children whose sum of a chunk is still to come."""
        return [child for child in self._children(chunk) if (chunk, child) not in self.sums]

    @property
    def waits_for(self) -> tuple[int, ...]:
        """The neighbors whose sums or means of this round are still to come."""
        if self.training and not self.away:
            return ()
        waits = set()
        for chunk in self._missing:
            waits.update(self._awaited(chunk) or [self._parent(chunk)])
        return tuple(sorted(waits & self.up))

    # What happens.

    def on_started(self, event: Started) -> Iterator[Command]:
        """Claim which links are down, and begin round 1."""
        for peer in self.site.neighbors:
            if peer not in self.up:
                yield from self._tell(self.links.see(peer, up=False), event.at)
        yield from self._begin()

    def on_train_done(self, event: TrainDone) -> Iterator[Command]:
        """Exchange what was trained."""
        self.training = False
        if self.away:
            yield Report(name="unused-training")
        elif self.site.ops.finite(event.after):
            self.own = event.after
        else:
            yield Report(name="training-not-finite")
        round = self.round
        yield from self._exchange()
        if self.round == round:
            yield from self._arm(event.at)

    def on_received(self, event: Received) -> Iterator[Command]:
        """Do what a message asks for."""
        source, message = event.source, event.message
        if message.kind == CLAIM:
            claim = self.links.read(message)
            if claim is None:
                yield Report(name="bad-message", nbytes=message.nbytes)
            else:
                news = self.links.hear(claim)
                yield from self._tell(news, event.at, but=source if news == claim else None)
        elif not self._fits(message):
            yield Report(name="bad-message", nbytes=message.nbytes)
        else:
            if message.step > self.round + 1:
                yield from self._catch_up(source, message.step, event.at)
            if message.kind == SUM:
                yield from self._take_sum(event)
            elif message.kind == MEAN:
                yield from self._take_mean(event)
            else:
                yield from self._answer(source, message)

    def on_timer(self, event: TimerFired) -> Iterator[Command]:
        """Begin the exchange anew, ask for what has not come, or go on without."""
        if event.name == SETTLE:
            self.settling = False
            for chunk in sorted(self.means):
                if self._parent(chunk) != OWNER:
                    yield self._mean_for(self._parent(chunk), chunk)
            yield from self._exchange()
        elif self.training:
            return
        elif event.name == RETRY:
            moving = self.heard_at > event.at - self.interval
            self.interval = self.retry if moving else min(2 * self.interval, 16 * self.retry)
            yield SetTimer(name=RETRY, at=event.at + self.interval)
            yield from self._ask()
        elif self.heard_at + self.patience > event.at:
            yield SetTimer(name=PATIENCE, at=self.heard_at + self.patience)
        else:
            missing = self._missing
            yield Report(name="missing-mean", count=len(missing))
            own = self.model if self.own is None else self.own
            for chunk in missing:
                self.means[chunk] = 1, self.site.ops.pack(own, self.partition, chunk)
            yield from self._finish()
            self.unsure = set(missing)

    def on_peer_up(self, event: PeerUp) -> Iterator[Command]:
        """Claim that a link is up, and tell the neighbor what there is to know."""
        yield from self._tell(self.links.see(event.peer, up=True), event.at)
        yield from self._compare(event.peer)

    def on_peer_down(self, event: PeerDown) -> Iterator[Command]:
        """Claim that a link is down."""
        yield from self._tell(self.links.see(event.peer, up=False), event.at)

    # The round.

    def _begin(self) -> Iterator[Command]:
        self.training = True
        yield Train(round=self.round, model=self.model)

    def _exchange(self) -> Iterator[Command]:
        """Send every sum that can be sent; end the round if all means are there."""
        # Each node begins at another chunk, so that not all send to the same owner at once.
        chunks = self.partition.fragments
        first = self.site.node * chunks // self.site.size + 1
        for chunk in range(first, first + chunks):
            if chunk % chunks not in self.means:
                yield from self._advance(chunk % chunks)
        yield from self._end()

    def _advance(self, chunk: int) -> Iterator[Command]:
        """Send the sum of a chunk, or make its mean, if all terms are there."""
        ready = self.away or not self.training
        if not ready or self.settling or chunk in self.sent or self._awaited(chunk):
            return
        parent = self._parent(chunk)
        if parent != OWNER:
            self.sent.add(chunk)
            yield self._sum_for(parent, chunk)
            return
        count, total = self._total(chunk)
        if total is None:
            total = self.site.ops.pack(self.model, self.partition, chunk)
        elif count > 1:
            total = self.site.ops.combine([total], [1 / count])
        yield from self._learn(chunk, count, total, source=None)

    def _total(self, chunk: int) -> tuple[int, Vector | None]:
        """Add up the own values and the children's sums, in ascending order of nodes."""
        terms = {child: self.sums[chunk, child] for child in self._children(chunk)}
        if self.own is not None:
            terms[self.site.node] = 1, self.site.ops.pack(self.own, self.partition, chunk)
        vectors = [vector for _, (_, vector) in sorted(terms.items()) if vector is not None]
        count = sum(count for count, _ in terms.values())
        if len(vectors) < 2:
            return count, vectors[0] if vectors else None
        return count, self.site.ops.combine(vectors, [1.0] * len(vectors))

    def _learn(self, chunk: int, count: int, mean: Vector, source: int | None) -> Iterator[Command]:
        """Keep a mean, and pass it on."""
        self.means[chunk] = count, mean
        for child in self._children(chunk):
            self.sums.pop((chunk, child), None)
        if self.away or self.settling:
            return  # who lacks it asks for it
        children = self._children(chunk)
        # Each node begins with another child, so that not all send to the same node at once.
        after = bisect(children, self.site.node)
        for peer in (self._parent(chunk), *children[after:], *children[:after]):
            if peer not in (source, OWNER):
                yield self._mean_for(peer, chunk)

    def _end(self) -> Iterator[Command]:
        if not self.training and not self._missing:
            yield from self._finish()

    def _finish(self) -> Iterator[Command]:
        """Make the next model of the means, and train on from it."""
        chunks = range(self.partition.fragments)
        self.model = self.site.ops.assemble(self.partition, [self.means[c][1] for c in chunks])
        self.present = min(self.means[c][0] for c in chunks)
        if self.present < self.site.size and not self.away:
            absent = self.site.size - self.present
            yield Report(name="absent-contribution", count=absent)
        if self.interval:
            self.interval = 0
            yield SetTimer(name=RETRY, at=None)
            yield SetTimer(name=PATIENCE, at=None)
        self._turn_to(self.round + 1, ahead=self.ahead)
        self.unsure, self.away = set(), False
        yield from self._begin()

    def _turn_to(self, round: int, ahead: dict[tuple[int, int], tuple[int, Vector | None]]) -> None:
        self.round, self.own = round, None
        self.sums, self.ahead = ahead, {}
        self.means, self.sent = {}, set()

    def _catch_up(self, source: int, step: int, at: int) -> Iterator[Command]:
        """Take over the means of the round before the one that a neighbor is at."""
        yield Report(name="skipped-round", count=step - 1 - self.round)
        self._turn_to(step - 1, ahead={})
        self.away = True
        self.unsure = set(range(self.partition.fragments))
        for chunk in self._missing:
            yield self._note(source, WANT, chunk)
        if not self.training:
            yield from self._arm(at)

    def _arm(self, at: int) -> Iterator[Command]:
        self.interval = self.retry
        yield SetTimer(name=RETRY, at=at + self.retry)
        yield SetTimer(name=PATIENCE, at=at + self.patience)

    # What is said of links.

    def _tell(self, news: Claim | None, at: int, but: int | None = None) -> Iterator[Command]:
        """Pass a claim on, and forget what belongs to the view before it."""
        if news is None:
            return
        for peer in sorted(self.up):
            if peer != but:
                yield Send(to=peer, message=news.message(self.round))
        self.sums, self.ahead, self.sent = {}, {}, set()
        if not self.settling:
            self.settling = True
            yield SetTimer(name=SETTLE, at=at + self.retry // 8)

    def _compare(self, peer: int) -> Iterator[Command]:
        """Tell a neighbor all that is known of links, and ask for what it knows in addition."""
        for claim in self.links:
            yield Send(to=peer, message=claim.message(self.round))
        yield self._note(peer, VIEW)

    # Messages.

    def _fits(self, message: Message) -> bool:
        """Tell whether a message is complete."""
        chunk, count = message.header.get("chunk"), message.header.get("count")
        if not isinstance(message.header.get("view"), int):
            return False
        if message.kind == VIEW:
            return True
        if not isinstance(chunk, int) or not 0 <= chunk < self.partition.fragments:
            return False
        if message.kind in (ASK, HAVE, WANT):
            return True
        if message.kind not in (SUM, MEAN) or not isinstance(count, int) or count < 0:
            return False
        if message.payload is None:
            return message.kind == SUM and count == 0
        return len(message.payload) == self.partition.length(chunk)

    def _take_sum(self, event: Received) -> Iterator[Command]:
        source, message = event.source, event.message
        step, chunk = message.step, int(message.header["chunk"])
        box = self.sums if step == self.round else self.ahead
        if step < self.round:
            yield from self._help(source, step, chunk)
        elif message.header["view"] != self.links.view:
            yield Report(name="stale-message", nbytes=message.nbytes)
        elif source not in self._children(chunk):
            yield Report(name="bad-message", nbytes=message.nbytes)
        elif step == self.round and chunk in self.means:
            yield self._mean_for(source, chunk)
        elif (chunk, source) in box:
            yield Report(name="duplicate-message", nbytes=message.nbytes)
        else:
            self.heard_at = event.at
            box[chunk, source] = int(message.header["count"]), message.payload
            if step == self.round:
                yield from self._advance(chunk)
                yield from self._end()

    def _take_mean(self, event: Received) -> Iterator[Command]:
        source, message = event.source, event.message
        chunk, payload = int(message.header["chunk"]), message.payload
        here = self.away or message.header["view"] == self.links.view
        if message.step != self.round or not here:
            yield Report(name="stale-message", nbytes=message.nbytes)
        elif chunk in self.means or payload is None:
            yield Report(name="duplicate-message", nbytes=message.nbytes)
        else:
            self.heard_at = event.at
            yield from self._learn(chunk, int(message.header["count"]), payload, source)
            yield from self._end()

    def _answer(self, source: int, message: Message) -> Iterator[Command]:
        """Answer a message of numbers alone."""
        kind, step, chunk = message.kind, message.step, int(message.header.get("chunk", 0))
        current, agreed = step == self.round, message.header["view"] == self.links.view
        if kind in (ASK, VIEW) and not agreed:
            yield from self._compare(source)
        if step < self.round - 1:
            yield self._note(source, VIEW)
        elif kind == WANT:
            if current and chunk in self.sent and chunk not in self.means:
                if self._parent(chunk) == source:
                    yield self._sum_for(source, chunk)
            else:
                yield from self._help(source, step, chunk)
        elif kind == HAVE:
            if current and chunk not in self.means:
                yield self._note(source, WANT, chunk)
        elif kind == ASK:
            box = self.sums if current else self.ahead
            if self._holds(step, chunk):
                yield self._note(source, HAVE, chunk, step)
            elif (
                step >= self.round
                and agreed
                and source in self._children(chunk)
                and (chunk, source) not in box
            ):
                yield self._note(source, WANT, chunk, step)
        elif step == self.round - 1:
            # A neighbor that is a round behind waits for sums that will not come any more.
            for each in range(self.partition.fragments):
                if self._parent(each) == source:
                    yield from self._help(source, step, each)

    def _ask(self) -> Iterator[Command]:
        """Ask for everything that has not come."""
        if self.away:
            for peer in sorted(self.up):
                for chunk in self._missing:
                    yield self._note(peer, ASK, chunk)
            return
        silent: set[int] = set()
        for chunk in self._missing:
            if chunk in self.sent:
                yield self._note(self._parent(chunk), ASK, chunk)
            else:
                silent.update(self._awaited(chunk))
        for peer in sorted(silent):
            yield self._note(peer, VIEW)

    def _holds(self, step: int, chunk: int) -> bool:
        """Tell whether this node has the mean of a round."""
        if step == self.round:
            return chunk in self.means
        return step == self.round - 1 and chunk not in self.unsure

    def _help(self, peer: int, step: int, chunk: int) -> Iterator[Command]:
        """Send a mean of this round or the last one; say where this node is if it is too late."""
        if step < self.round - 1:
            yield self._note(peer, VIEW)
        elif self._holds(step, chunk):
            if step == self.round:
                yield self._mean_for(peer, chunk)
            else:
                values = self.site.ops.pack(self.model, self.partition, chunk)
                yield self._send(peer, MEAN, chunk, step, self.present, values)

    def _sum_for(self, peer: int, chunk: int) -> Send:
        return self._send(peer, SUM, chunk, self.round, *self._total(chunk))

    def _mean_for(self, peer: int, chunk: int) -> Send:
        return self._send(peer, MEAN, chunk, self.round, *self.means[chunk])

    def _send(
        self, to: int, kind: str, chunk: int, step: int, count: int, payload: Vector | None
    ) -> Send:
        header = {"chunk": chunk, "count": count, "view": self.links.view}
        return Send(to=to, message=Message(kind=kind, step=step, payload=payload, header=header))

    def _note(self, to: int, kind: str, chunk: int | None = None, step: int | None = None) -> Send:
        header = {"view": self.links.view} | ({} if chunk is None else {"chunk": chunk})
        step = self.round if step is None else step
        return Send(to=to, message=Message(kind=kind, step=step, header=header))
