"""Let what happened in virtual time happen to the real-time runtime.

A transcript of a virtual run says what happened to which node, when, and what its machine answered.
:class:`Replay` puts the pump of every node to work, each with a clock that stands still and with
links on which nothing moves by itself. Line by line, it sets a clock, and releases what the line
names: a delivery, the end of a training, a timer, a link. What the pump then writes into its own
transcript has to be the same line.

Nothing is taken from the transcript but the order of things. Messages and vectors are in it only as
digests; those that move here have been made here, by the pumps, and a line that names a message
which no pump has sent is a difference like any other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TypeAlias

from flwr_decentral.channel.memory import Parcel, Switchboard
from flwr_decentral.channel.pump import Pump
from flwr_decentral.channel.rounds import Segment
from flwr_decentral.channel.trainer import Done, Outcome, Task
from flwr_decentral.core import Algorithm, Site, Vector
from flwr_decentral.core.transcript import format_message

from .clocks import ManualClock

Train: TypeAlias = Callable[[int, int, int, Vector], Vector]
"""``train(node, round, seed, vector)`` returns the trained vector, or raises."""


class _Trainer:
    """Train when the transcript says that it is done."""

    def __init__(self, node: int, train: Train) -> None:
        self._node, self._train = node, train
        self._task: tuple[Task, Done] | None = None

    def start(self, task: Task, done: Done) -> None:
        assert self._task is None, f"node {self._node} has two trainings in flight"
        self._task = (task, done)

    def cancel(self) -> None:
        self._task = None

    def finish(self) -> None:
        if self._task is None:
            raise AssertionError(f"node {self._node} has no training in flight")
        (task, done), self._task = self._task, None
        try:
            model = self._train(self._node, task.round, task.seed, task.model.copy())
        except Exception as error:  # noqa: BLE001 - as a user's function may
            done(Outcome(error=f"{type(error).__name__}: {error}"))
        else:
            done(Outcome(model=model))


class Replay:
    """Pumps that do what a transcript says.

    Parameters
    ----------
    algorithm : Algorithm
        What each node runs.
    sites : iterable of Site
        Those of all nodes, as they were in the virtual run.
    train : callable
        ``train(node, round, seed, vector)`` returns the trained vector; what it raises is a failed
        training.
    segment : Segment
        How far to train.

    Attributes
    ----------
    pumps : list of Pump
        One for each node.
    """

    def __init__(
        self, algorithm: Algorithm, sites: Iterable[Site], train: Train, segment: Segment
    ) -> None:
        self._sites = list(sites)
        self._held: list[Parcel] = []
        self._board = Switchboard(self._sites[0].topology, self._hold)
        self._clocks = [ManualClock() for _ in self._sites]
        self._trainers = [_Trainer(site.node, train) for site in self._sites]
        self._written: list[str] = []
        self.pumps = [
            Pump(
                algorithm,
                site,
                self._board.transport(site.node),
                self._trainers[site.node],
                self._clocks[site.node],
                self._written.append,
            )
            for site in self._sites
        ]
        for pump in self.pumps:
            self._board.transport(pump.site.node).attach(pump)
            pump.resume(segment, ended=lambda: None)

    def run(self, transcript: Iterable[str]) -> int:
        """Replay a transcript to its end.

        Returns
        -------
        int
            How many lines were replayed.

        Raises
        ------
        AssertionError
            At the first line that does not come out the same.
        """
        number = 0
        for number, line in enumerate(transcript, 1):
            self._written.clear()
            try:
                self._happen(line)
            except AssertionError as error:
                raise AssertionError(f"line {number} cannot be replayed: {error}\n{line}") from None
            if self._written != [line]:
                raise AssertionError(
                    f"line {number} differs\n  virtual: {line}\n  real:    "
                    + ("\n           ".join(self._written) or "nothing happened")
                )
        return number

    def _happen(self, line: str) -> None:
        at, name, kind, *rest = line.split(" ", 3)
        node, details = int(name[1:]), rest[0] if rest else ""
        pump, transport = self.pumps[node], self._board.transport(node)
        self._clocks[node].time = int(at)
        happened = details.partition(" -> ")[0]
        fields = dict(each.partition("=")[::2] for each in happened.split(" "))
        match kind:
            case "Started":
                for peer in filter(None, fields["up"].split(",")):
                    transport.meet(int(peer))
                pump.start()
            case "TrainDone" | "TrainFailed":
                self._trainers[node].finish()
            case "Received":
                self._deliver(int(fields["source"]), node, details)
            case "TimerFired":
                assert self._clocks[node].ring(), "no timer is due"
            case "LinkIdle":
                pump.link_idle()
            case "PeerUp":
                transport.meet(int(fields["peer"]))
            case "PeerDown":
                transport.lose(int(fields["peer"]))
            case "Stopped":
                pump.stop("the run has ended")
        pump.check()

    def _hold(self, parcel: Parcel) -> None:
        if parcel.start():
            self._held.append(parcel)

    def _deliver(self, src: int, dst: int, details: str) -> None:
        for parcel in [each for each in self._held if (each.src, each.dst) == (src, dst)]:
            told = f"source={src} {format_message(parcel.message)}"
            if details == told or details.startswith(f"{told} ->"):
                self._held.remove(parcel)
                # What is sent again looks like what was lost with an earlier link.
                if parcel.deliver():
                    return
        raise AssertionError(f"no such message of node {src} is on its way to {dst}")
