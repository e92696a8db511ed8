"""The running state of a node.

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

from .messages import ASK, HAVE, MEAN, SUM, VIEW, WANT, fits, note, values
from .reduction import Reduction
from .routes import OWNER, Forest, forests

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
    away : bool
        This node takes the means of its round over, and adds nothing.
    settling : bool
        The view has changed, and may change again at once.
    reduction : Reduction
        What there is of the round.
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
        "away",
        "settling",
        "reduction",
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
        self.reduction = Reduction(site, partition)
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

    def _awaited(self, chunk: int) -> list[int]:
        """List the children whose sum of a chunk is still to come."""
        return self.reduction.awaited(chunk, self._children(chunk))

    @property
    def waits_for(self) -> tuple[int, ...]:
        """The neighbors whose sums or means of this round are still to come."""
        if self.training and not self.away:
            return ()
        waits = set()
        for chunk in self.reduction.missing:
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
            self.reduction.own = event.after
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
        elif not fits(message, self.partition):
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
            for chunk in sorted(self.reduction.means):
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
            missing = self.reduction.missing
            yield Report(name="missing-mean", count=len(missing))
            own = self.model if self.reduction.own is None else self.reduction.own
            for chunk in missing:
                self.reduction.means[chunk] = 1, self.site.ops.pack(own, self.partition, chunk)
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
            if chunk % chunks not in self.reduction.means:
                yield from self._advance(chunk % chunks)
        yield from self._end()

    def _advance(self, chunk: int) -> Iterator[Command]:
        """Send the sum of a chunk, or make its mean, if all terms are there."""
        ready = self.away or not self.training
        if not ready or self.settling or chunk in self.reduction.sent or self._awaited(chunk):
            return
        parent = self._parent(chunk)
        if parent != OWNER:
            self.reduction.sent.add(chunk)
            yield self._sum_for(parent, chunk)
            return
        count, mean = self.reduction.mean(chunk, self._children(chunk), self.model)
        yield from self._learn(chunk, count, mean, source=None)

    def _learn(self, chunk: int, count: int, mean: Vector, source: int | None) -> Iterator[Command]:
        """Keep a mean, and pass it on."""
        children = self._children(chunk)
        self.reduction.learn(chunk, count, mean, children)
        if self.away or self.settling:
            return  # who lacks it asks for it
        # Each node begins with another child, so that not all send to the same node at once.
        after = bisect(children, self.site.node)
        for peer in (self._parent(chunk), *children[after:], *children[:after]):
            if peer not in (source, OWNER):
                yield self._mean_for(peer, chunk)

    def _end(self) -> Iterator[Command]:
        if not self.training and self.reduction.complete:
            yield from self._finish()

    def _finish(self) -> Iterator[Command]:
        """Make the next model of the means, and train on from it."""
        self.model, self.present = self.reduction.model(), self.reduction.present
        if self.present < self.site.size and not self.away:
            absent = self.site.size - self.present
            yield Report(name="absent-contribution", count=absent)
        if self.interval:
            self.interval = 0
            yield SetTimer(name=RETRY, at=None)
            yield SetTimer(name=PATIENCE, at=None)
        self.reduction.turn()
        self.round += 1
        self.unsure, self.away = set(), False
        yield from self._begin()

    def _catch_up(self, source: int, step: int, at: int) -> Iterator[Command]:
        """Take over the means of the round before the one that a neighbor is at."""
        yield Report(name="skipped-round", count=step - 1 - self.round)
        self.reduction.turn(missed=True)
        self.round, self.away = step - 1, True
        self.unsure = set(range(self.partition.fragments))
        for chunk in self.reduction.missing:
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
        self.reduction.forget_sums()
        if not self.settling:
            self.settling = True
            yield SetTimer(name=SETTLE, at=at + self.retry // 8)

    def _compare(self, peer: int) -> Iterator[Command]:
        """Tell a neighbor all that is known of links, and ask for what it knows in addition."""
        for claim in self.links:
            yield Send(to=peer, message=claim.message(self.round))
        yield self._note(peer, VIEW)

    # Messages.

    def _take_sum(self, event: Received) -> Iterator[Command]:
        source, message = event.source, event.message
        step, chunk = message.step, int(message.header["chunk"])
        box = self.reduction.sums if step == self.round else self.reduction.ahead
        if step < self.round:
            yield from self._help(source, step, chunk)
        elif message.header["view"] != self.links.view:
            yield Report(name="stale-message", nbytes=message.nbytes)
        elif source not in self._children(chunk):
            yield Report(name="bad-message", nbytes=message.nbytes)
        elif step == self.round and chunk in self.reduction.means:
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
        elif chunk in self.reduction.means or payload is None:
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
            if current and chunk in self.reduction.sent and chunk not in self.reduction.means:
                if self._parent(chunk) == source:
                    yield self._sum_for(source, chunk)
            else:
                yield from self._help(source, step, chunk)
        elif kind == HAVE:
            if current and chunk not in self.reduction.means:
                yield self._note(source, WANT, chunk)
        elif kind == ASK:
            box = self.reduction.sums if current else self.reduction.ahead
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
                for chunk in self.reduction.missing:
                    yield self._note(peer, ASK, chunk)
            return
        silent: set[int] = set()
        for chunk in self.reduction.missing:
            if chunk in self.reduction.sent:
                yield self._note(self._parent(chunk), ASK, chunk)
            else:
                silent.update(self._awaited(chunk))
        for peer in sorted(silent):
            yield self._note(peer, VIEW)

    def _holds(self, step: int, chunk: int) -> bool:
        """Tell whether this node has the mean of a round."""
        if step == self.round:
            return chunk in self.reduction.means
        return step == self.round - 1 and chunk not in self.unsure

    def _help(self, peer: int, step: int, chunk: int) -> Iterator[Command]:
        """Send a mean of this round or the last one; say where this node is if it is too late."""
        if step < self.round - 1:
            yield self._note(peer, VIEW)
        elif self._holds(step, chunk):
            if step == self.round:
                yield self._mean_for(peer, chunk)
            else:
                mean = self.site.ops.pack(self.model, self.partition, chunk)
                yield self._values(peer, MEAN, chunk, step, self.present, mean)

    def _sum_for(self, peer: int, chunk: int) -> Send:
        return self._values(
            peer, SUM, chunk, self.round, *self.reduction.total(chunk, self._children(chunk))
        )

    def _mean_for(self, peer: int, chunk: int) -> Send:
        return self._values(peer, MEAN, chunk, self.round, *self.reduction.means[chunk])

    def _values(
        self, to: int, kind: str, chunk: int, step: int, count: int, payload: Vector | None
    ) -> Send:
        view = self.links.view
        return values(to, kind, chunk=chunk, step=step, view=view, count=count, payload=payload)

    def _note(self, to: int, kind: str, chunk: int | None = None, step: int | None = None) -> Send:
        step = self.round if step is None else step
        return note(to, kind, step=step, view=self.links.view, chunk=chunk)
