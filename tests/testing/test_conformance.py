"""The kit can fail: each of these algorithms has one flaw, and one check finds it."""

import dataclasses
import inspect
import os
import subprocess
import sys
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

import numpy as np
import pytest

from flwr_decentral.core import (
    AlgorithmError,
    Capabilities,
    Halt,
    Message,
    Received,
    Report,
    Send,
    SetTimer,
    Train,
)
from flwr_decentral.testing.conformance import AlgorithmConformance
from flwr_decentral.testing.toys import Gossip, GossipMachine, Lockstep, LockstepMachine


def check(algorithm, name, **settings):
    """Run one check of the kit on an algorithm; its other parameters take the named case."""
    kit = type("Kit", (AlgorithmConformance,), {"algorithm": algorithm, "registered": False})()
    method = getattr(kit, name)
    cases = kit.cases() | {"subject": {"it": algorithm}}
    names = {"subject": "it", "graph": "ring", "faults": "nothing"} | settings
    wanted = inspect.signature(method).parameters
    method(**{each: cases[each][names[each]] for each in wanted})


def broken(base=Gossip, **fields):
    """Make an algorithm of a machine with a flaw."""

    def decorate(machine):
        def make(_, site):
            return machine(site, 60 * 10**9) if base is Lockstep else machine(site)

        body = {"name": "broken", "__doc__": "Broken.", "machine": make, **fields}
        return dataclass(frozen=True, kw_only=True)(type(machine.__name__, (base,), body))()

    return decorate


@broken()
class WritesToWhatItReceived(GossipMachine):
    def on_received(self, event):
        event.message.payload *= np.float32(0.5)
        yield from super().on_received(event)


@broken()
class WritesToWhatItSent(GossipMachine):
    STATE = (*GossipMachine.STATE, "last")
    last = None

    def on_train_done(self, event):
        if self.last is not None:
            self.last += 1
        self.last = event.after
        yield from super().on_train_done(event)


@broken()
class WritesToWhatItSentBehindTheFlag(GossipMachine):
    STATE = (*GossipMachine.STATE, "last")
    last = None

    def on_train_done(self, event):
        if self.last is not None:
            self.last += 1
        self.last = event.after
        for command in super().on_train_done(event):
            if isinstance(command, Send):
                message = dataclasses.replace(command.message, payload=event.after[:])
                command = dataclasses.replace(command, message=message)
            yield command


@broken()
class WritesToWhatIsInTraining(GossipMachine):
    def on_received(self, event):
        self.model += event.message.payload
        return ()


@broken()
class WritesToTheHeader(GossipMachine):
    def on_train_done(self, event):
        for command in super().on_train_done(event):
            if isinstance(command, Send):
                command = Send(
                    to=command.to, message=dataclasses.replace(command.message, header={"hops": 1})
                )
            yield command

    def on_received(self, event):
        event.message.header["hops"] += 1
        yield from super().on_received(event)


@broken()
class HidesState(GossipMachine):
    seen = 0

    def on_received(self, event):
        self.seen += 1
        yield from super().on_received(event)


@broken()
class HidesStateInAnObject(GossipMachine):
    def __init__(self, site):
        super().__init__(site)
        self.memory = {"seen": []}

    def on_received(self, event):
        self.memory["seen"].append(event.source)
        yield from super().on_received(event)
        yield Report(name="seen", count=len(self.memory["seen"]))


@broken()
class CachesItsState(GossipMachine):
    @cached_property
    def seen(self):
        return []

    def on_received(self, event):
        self.seen.append(event.source)
        yield from super().on_received(event)
        yield Report(name="seen", count=len(self.seen))


@broken()
class KeepsAnObjectInItsState(GossipMachine):
    STATE = (*GossipMachine.STATE, "log")

    def __init__(self, site):
        super().__init__(site)
        self.log = [Report(name="made")]


@broken()
class LendsItsState(LockstepMachine):
    STATE = (*LockstepMachine.STATE, "seen")

    def __init__(self, site):
        super().__init__(site, 60 * 10**9)
        self.seen = []

    def on_received(self, event):
        self.seen.append(event.source)
        yield from super().on_received(event)

    def snapshot(self):
        return super().snapshot() | {"seen": self.seen}


@broken()
class UsesGlobalDice(GossipMachine):
    def on_train_done(self, event):
        chosen = np.random.default_rng().choice(sorted(self.up))
        for command in super().on_train_done(event):
            if not isinstance(command, Send) or command.to == chosen:
                yield command


@broken()
class SharesState(GossipMachine):
    everybody: ClassVar = []

    def on_train_done(self, event):
        self.everybody.append(event.round)
        yield Report(name="rounds-of-all", count=len(self.everybody))
        yield from super().on_train_done(event)


@broken()
class DrawsTheSameForAnySeed(GossipMachine):
    def __init__(self, site):
        super().__init__(site)
        site.seeds.generator("peers")


class FollowingMachine(GossipMachine):
    def on_train_done(self, event):
        commands = list(super().on_train_done(event))
        by_name = {f"{event.round}-{each.to}": each for each in commands if isinstance(each, Send)}
        yield from (by_name[name] for name in set(by_name))
        yield commands[-1]


@dataclass(frozen=True, kw_only=True)
class FollowsTheOrderOfASet(Gossip):
    def machine(self, site):
        return FollowingMachine(site)


@broken()
class TrainsTwice(GossipMachine):
    def on_train_done(self, event):
        yield from super().on_train_done(event)
        yield Train(round=event.round + 2, model=self.model)


@broken()
class RepeatsARound(GossipMachine):
    def on_train_done(self, event):
        for command in super().on_train_done(event):
            if isinstance(command, Train) and event.round == 3:
                command = Train(round=event.round, model=self.model)
            yield command


@broken()
class TrainsAfterHalt(GossipMachine):
    def on_train_done(self, event):
        yield Halt(reason="enough")
        yield from super().on_train_done(event)


@broken()
class TrainsAPart(GossipMachine):
    def on_started(self, event):
        yield Train(round=1, model=self.model[:3])


@broken()
class TrainsInDoublePrecision(GossipMachine):
    def on_started(self, event):
        yield Train(round=1, model=self.model.astype(np.float64))


@broken()
class WritesToStrangers(GossipMachine):
    def on_train_done(self, event):
        yield from super().on_train_done(event)
        to = (self.site.node + 2) % self.site.size
        yield Send(to=to, message=Message(kind="model", step=event.round, payload=self.model))


@broken()
class SendsNumpyNumbers(GossipMachine):
    def on_train_done(self, event):
        header = {"norm": np.float32(1)}
        message = Message(kind="norm", step=event.round, header=header)
        yield Send(to=self.site.neighbors[0], message=message)
        yield from super().on_train_done(event)


@broken()
class SendsALongHeader(GossipMachine):
    def on_train_done(self, event):
        header = {f"word-{i}": i for i in range(6)}
        message = Message(kind="words", step=event.round, header=header)
        yield Send(to=self.site.neighbors[0], message=message)
        yield from super().on_train_done(event)


@broken()
class RoundsNothing(GossipMachine):
    def on_train_done(self, event):
        for command in super().on_train_done(event):
            if isinstance(command, Send):
                message = dataclasses.replace(command.message, wire="int8")
                yield dataclasses.replace(command, message=message)
            else:
                yield command


@broken()
class NeverCountsUp(GossipMachine):
    def on_train_done(self, event):
        for command in super().on_train_done(event):
            if isinstance(command, Send):
                message = dataclasses.replace(command.message, step=1)
                command = dataclasses.replace(command, message=message)
            yield command


@broken()
class TakesInNaN(GossipMachine):
    def step(self, event):
        return list(self.on_received(event)) if isinstance(event, Received) else super().step(event)


@broken()
class DiscardsNaNInSilence(GossipMachine):
    def step(self, event):
        finite = not isinstance(event, Received) or self.site.ops.finite(event.message.payload)
        return super().step(event) if finite else []


@broken(Lockstep)
class HangsOnLoss(LockstepMachine):
    def step(self, event):
        return [each for each in super().step(event) if not isinstance(each, SetTimer)]


@broken(Lockstep)
class WaitsForTheGone(LockstepMachine):
    def step(self, event):
        return [each for each in super().step(event) if not isinstance(each, SetTimer)]

    def on_peer_down(self, event):
        return ()


@broken(Lockstep)
class WaitsForStrangers(LockstepMachine):
    waits_for = property(lambda self: (self.site.size,) if self.waiting else ())


@broken()
class StopsAtAFailure(GossipMachine):
    def on_train_failed(self, event):
        return ()


@broken()
class CountsDuplicatesTwice(GossipMachine):
    STATE = ("model", "letters")

    def __init__(self, site):
        super().__init__(site)
        self.letters = []

    def on_received(self, event):
        self.letters.append(event.message.payload)
        return ()

    def on_train_done(self, event):
        vectors = [event.after, *self.letters]
        self.letters = []
        self.model = self.site.ops.combine(vectors, [1 / len(vectors)] * len(vectors))
        for peer in sorted(self.up):
            message = Message(kind="model", step=event.round, payload=event.after)
            yield Send(to=peer, message=message)
        yield Train(round=event.round + 1, model=self.model)


@broken(Lockstep)
class TakesAnEchoForNews(LockstepMachine):
    def on_received(self, event):
        message = dataclasses.replace(event.message, step=max(event.message.step, self.round))
        yield from super().on_received(dataclasses.replace(event, message=message))


@broken(Lockstep)
class RemembersOnlyTheLast(LockstepMachine):
    STATE = (*LockstepMachine.STATE, "last")
    last = None

    def on_received(self, event):
        key = event.source, event.message.step
        if key != self.last:
            self.last = key
            message = dataclasses.replace(event.message, step=max(key[1], self.round))
            yield from super().on_received(dataclasses.replace(event, message=message))


@broken()
class CalculatesByItself(GossipMachine):
    def on_train_done(self, event):
        letters = self.inbox.drain()
        self.model = np.mean([event.after, *(letter.payload for letter in letters)], axis=0)
        for peer in sorted(self.up):
            message = Message(kind="model", step=event.round, payload=event.after)
            yield Send(to=peer, message=message)
        yield Train(round=event.round + 1, model=self.model)


@broken()
class WeighsTooMuch(GossipMachine):
    def on_train_done(self, event):
        *sends, train = super().on_train_done(event)
        yield from sends
        self.model = self.site.ops.combine([self.model], [1.001])
        yield dataclasses.replace(train, model=self.model)


@broken(capabilities=Capabilities(communicates=False))
class DeniesThatItSends(GossipMachine):
    pass


@broken(capabilities=Capabilities(link_idle=True))
class WantsWhatItIgnores(GossipMachine):
    pass


@broken(capabilities=Capabilities(needs_tree=True))
class ForgetsToAskForATree(GossipMachine):
    pass


WRITES = "test_leaves_events_and_shared_vectors_alone"
PURE = "test_answers_the_same_event_with_the_same_commands"
WHOLE = "test_goes_on_from_any_snapshot"
ENDS = "test_runs_to_the_end"
SURVIVES = "test_survives"
DECLARES = "test_does_what_it_declares"
REAL = "test_does_the_same_in_real_time"

FLAWS = [
    (WritesToWhatItReceived, WRITES, "wrote to a vector that others read", {}),
    (WritesToWhatItSent, WRITES, "wrote to a vector that others read", {}),
    (WritesToWhatItSentBehindTheFlag, WRITES, "after it was sent", {}),
    (WritesToWhatIsInTraining, WRITES, "given to training is not its own", {}),
    (WritesToTheHeader, WRITES, "changed the Received event", {}),
    (WaitsForStrangers, WRITES, "waits_for must name neighbors", {}),
    (UsesGlobalDice, PURE, "draws from global dice", {}),
    (SharesState, PURE, "shares state with other machines", {}),
    (UsesGlobalDice, "test_repeats", "two runs of one seed differ: line", {}),
    (UsesGlobalDice, "test_follows_the_seed_if_it_draws", "draws nothing from site.seeds", {}),
    (DrawsTheSameForAnySeed, "test_follows_the_seed_if_it_draws", "seed changes nothing", {}),
    (HidesState, WHOLE, "changes seen on Received", {}),
    (HidesStateInAnObject, WHOLE, "changes memory on Received", {}),
    (CachesItsState, WHOLE, "is not the whole state", {}),
    (KeepsAnObjectInItsState, WHOLE, r"without pickle: \['log'\]\[0\]: Report", {}),
    (LendsItsState, "test_leaves_its_snapshot_alone", "a snapshot changes with the machine", {}),
    (TrainsTwice, ENDS, "while its training of round 2 goes on", {}),
    (RepeatsARound, ENDS, "asks for round 3 after round 3", {}),
    (TrainsAfterHalt, ENDS, "after it has halted", {}),
    (TrainsAPart, ENDS, "trains 3 values of a model of 37", {}),
    (TrainsInDoublePrecision, ENDS, "trains float64 of shape", {}),
    (WritesToStrangers, ENDS, "sends to 2, which is no neighbor", {}),
    (WritesToStrangers, ENDS, "sends to 2, which is no neighbor", {"graph": "3-nodes"}),
    (SendsNumpyNumbers, ENDS, "a header of other than int and float", {}),
    (SendsALongHeader, ENDS, "sends 6 numbers in a header", {}),
    (RoundsNothing, ENDS, "sends values as int8 that were not rounded to it", {}),
    (NeverCountsUp, "test_counts_the_steps_of_its_messages_up", "of step 1 to 1 after step 1", {}),
    (TakesInNaN, "test_never_takes_in_what_is_not_finite", r"in the models of nodes \[0, 1", {}),
    (DiscardsNaNInSilence, "test_never_takes_in_what_is_not_finite", ", 0 were counted", {}),
    (
        HangsOnLoss,
        SURVIVES,
        r"(?s)waits for ever on \[\(0, 1\).*\(node 0 after 3 trainings for 5; .* Received ",
        {"faults": "drop-0.1"},
    ),
    (HangsOnLoss, SURVIVES, "needs a timer", {"faults": "not-finite"}),
    (WaitsForTheGone, SURVIVES, "waits for ever", {"faults": "leave-while-awaited"}),
    (StopsAtAFailure, SURVIVES, "node 1 after 3 trainings", {"faults": "training-fails-once"}),
    (HangsOnLoss, "test_survives_a_storm_among_few_nodes", "waits for ever", {}),
    (HangsOnLoss, "test_survives_any_mix_of_faults", "waits for ever", {}),
    (CountsDuplicatesTwice, "test_counts_duplicates_once", "because messages arrived twice", {}),
    (TakesAnEchoForNews, "test_counts_duplicates_once", "arrived twice, 0 ns later", {}),
    (RemembersOnlyTheLast, "test_counts_duplicates_once", "arrived twice, 2000000000 ns", {}),
    (CalculatesByItself, "test_does_its_arithmetic_through_ops", "no result of site.ops", {}),
    (WeighsTooMuch, "test_leaves_equal_models_equal", "add up to one", {}),
    (DeniesThatItSends, DECLARES, "it declares communicates=False and sent", {}),
    (WantsWhatItIgnores, DECLARES, "on_link_idle is not implemented", {}),
    (FollowsTheOrderOfASet(), "test_repeats_in_a_fresh_process", "the order of a set", {}),
    (SharesState, REAL, r"line \d+ differs\n  virtual: ", {}),
    (UsesGlobalDice, REAL, r"line \d+ (differs|cannot be replayed)", {}),
]


@pytest.mark.parametrize(
    ("algorithm", "name", "message", "settings"),
    FLAWS,
    ids=[f"{type(algorithm).__name__}-{name}" for algorithm, name, *_ in FLAWS],
)
def test_finds_the_flaw(algorithm, name, message, settings):
    with pytest.raises((AssertionError, AlgorithmError), match=message):
        check(algorithm, name, **settings)


def test_demands_a_tree_where_one_is_declared():
    with pytest.raises(pytest.fail.Exception, match="DID NOT RAISE"):
        check(ForgetsToAskForATree, "test_refuses_a_ring_if_it_needs_a_tree")


def test_demands_the_entry_point():
    kit = type("Kit", (AlgorithmConformance,), {"algorithm": Gossip()})()
    with pytest.raises(AssertionError, match="0 installed packages register 'gossip'"):
        kit.test_is_registered_under_its_name()


class _Undecorated(Gossip):
    pass


@dataclass(frozen=True, kw_only=True)
class _HoldsAList(Gossip):
    peers: tuple[int, ...] = (1, 2)


@dataclass(frozen=True)
class _Positional(Gossip):
    peers: int = 1


@dataclass(frozen=True, kw_only=True)
class _Forgets(Gossip):
    peers: int = 1

    def __post_init__(self):
        object.__setattr__(self, "peers", self.peers + 1)


@dataclass(frozen=True, kw_only=True)
class _Shouts(Gossip):
    """Shout."""

    name = "My Gossip"


@pytest.mark.parametrize(
    ("algorithm", "name", "message"),
    [
        (_Undecorated(), "test_is_a_frozen_keyword_only_dataclass", "is not decorated"),
        (_HoldsAList(), "test_is_a_frozen_keyword_only_dataclass", "so that a configuration"),
        (_Positional(), "test_is_a_frozen_keyword_only_dataclass", "must be keyword-only"),
        (_Forgets(), "test_can_be_printed_and_made_again", "made again from its parameters"),
        (_Shouts(), "test_says_what_it_is", "kebab case"),
    ],
)
def test_finds_a_careless_declaration(algorithm, name, message):
    with pytest.raises(AssertionError, match=message):
        check(algorithm, name)


def test_every_check_has_been_seen_to_fail():
    checks = {name for name in vars(AlgorithmConformance) if name.startswith("test_")}
    seen = {name for _, name, *_ in FLAWS} | {
        "test_is_a_frozen_keyword_only_dataclass",
        "test_can_be_printed_and_made_again",
        "test_says_what_it_is",
        "test_is_registered_under_its_name",
        "test_refuses_a_ring_if_it_needs_a_tree",
    }
    # These two only report what a user's ConfigurationError says.
    assert checks - seen == {"test_accepts_its_topologies", "test_trains_models_of_one_parameter"}


SUITE = """
from dataclasses import dataclass
from flwr_decentral.core import Machine
from flwr_decentral.testing.conformance import AlgorithmConformance
from flwr_decentral.testing.toys import Gossip, GossipMachine

class Forgetful(GossipMachine):
    def on_train_failed(self, event):
        return ()

@dataclass(frozen=True, kw_only=True)
class Mine(Gossip):
    '''Mine.'''
    name = "mine"
    forgetful: bool = False
    def machine(self, site):
        return Forgetful(site) if self.forgetful else GossipMachine(site)

class TestMine(AlgorithmConformance):
    algorithm = Mine()
    variants = (Mine(forgetful=True),)
    registered = False
"""


@pytest.mark.slow
def test_is_a_pytest_class_to_subclass(tmp_path):
    (tmp_path / "test_mine.py").write_text(SUITE, encoding="utf-8")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", "fails"]
    done = subprocess.run(
        [*command, "-W", "error", "--rootdir", str(tmp_path), str(tmp_path)],
        env={**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    failed = [line for line in done.stdout.splitlines() if line.startswith("FAILED")]
    assert "2 failed, 2 passed" in done.stdout, done.stdout
    assert all("[mine-forgetful=True-training-fails-" in line for line in failed)
    assert "node 1 after 3 trainings for nobody it can name" in done.stdout
