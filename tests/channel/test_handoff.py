"""Tasks go to processes that come, go and die, and each counts once."""

import asyncio
import contextlib
import functools
import json
import os
import signal
import socket
import subprocess
import sys
import textwrap
import threading

import numpy as np
import pytest

from flwr_decentral.channel import attachment as client
from flwr_decentral.channel import client as asking
from flwr_decentral.channel import handoff as module
from flwr_decentral.channel.attachment import Aborted, Attachment
from flwr_decentral.channel.handoff import Handoff, Slots
from flwr_decentral.channel.trainer import Outcome, Task
from flwr_decentral.core import SECOND, ConfigurationError, RuntimeFault
from flwr_decentral.localsocket import Listener, encode_frame
from flwr_decentral.testing.clocks import ManualClock

pytestmark = [
    pytest.mark.net,
    pytest.mark.skipif(sys.platform != "linux", reason="abstract sockets are Linux's"),
]

SIZE = 1000
MODEL = np.arange(SIZE, dtype=np.float32)
PATIENCE = 60 * SECOND
DEADLINE_S = 30


class Sidecar:
    """The sidecar's end, in this process."""

    def __init__(self, admit=None, private=0):
        listener = Listener()
        self.address, self.clock = listener.address, ManualClock()
        options = {} if admit is None else {"admit": admit}
        slots = Slots(size=SIZE, private_bytes=private, blob=b"layout")
        lend = lambda: MODEL * np.float32(3)  # noqa: E731
        self.handoff = Handoff(slots, listener, self.clock, PATIENCE, lend, **options)
        self.outcomes = asyncio.Queue()

    def start(self, round=1, model=MODEL):
        task = Task(round=round, seed=100 + round, model=model)
        self.handoff.start(task, self.outcomes.put_nowait)

    async def outcome(self) -> Outcome:
        return await self.outcomes.get()


@contextlib.asynccontextmanager
async def sidecar(**options):
    async with asyncio.timeout(DEADLINE_S):
        made = Sidecar(**options)
        made.handoff.open()
        try:
            yield made
        finally:
            await made.handoff.close()


def on_a_loop(test):
    """Run a test that is a coroutine function."""

    @functools.wraps(test)
    def run(*args, **kwargs):
        asyncio.run(test(*args, **kwargs))

    return run


def in_thread(function, *arguments):
    """Call a blocking function without stopping the loop."""
    return asyncio.get_running_loop().run_in_executor(None, function, *arguments)


PREAMBLE = """
import json, sys
import numpy as np
from flwr_decentral.channel.attachment import Attachment
def tell(*what):
    print(json.dumps(what), flush=True)
"""


class Process:
    """A trainer in a process of its own, which tells what it does and waits to be told to go on."""

    def __init__(self, address, code):
        self.process = subprocess.Popen(
            [sys.executable, "-c", PREAMBLE + textwrap.dedent(code), address],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    async def told(self):
        line = await in_thread(self.process.stdout.readline)
        assert line, "the process has ended"
        return json.loads(line)

    def go_on(self):
        self.process.stdin.write("\n")
        self.process.stdin.flush()

    def kill(self):
        self.process.send_signal(signal.SIGKILL)

    async def ended(self):
        code = await in_thread(self.process.wait)
        self.process.stdin.close()
        self.process.stdout.close()
        return code


TRAIN = """
with Attachment(sys.argv[1], {}) as attachment:
    while (task := attachment.next()) is not None:
        tell("got", task.round, task.seed, task.generation)
        sys.stdin.readline()
        task.output[:] = task.model + np.float32(1)
        tell("counted" if attachment.commit(task) else "late")
    tell("left", attachment.farewell)
"""


# --- what goes right ------------------------------------------------------------------------------


@pytest.mark.slow
@on_a_loop
async def test_a_process_trains_round_after_round_until_it_is_dismissed():
    async with sidecar() as side:
        side.start(1)
        trainer = Process(side.address, TRAIN)
        assert await trainer.told() == ["got", 1, 101, 1]
        assert side.handoff.trainer == trainer.process.pid
        trainer.go_on()
        np.testing.assert_array_equal((await side.outcome()).model, MODEL + 1)
        assert await trainer.told() == ["counted"]
        side.start(2, MODEL * np.float32(2))
        assert await trainer.told() == ["got", 2, 102, 2]
        trainer.go_on()
        outcome = await side.outcome()
        np.testing.assert_array_equal(outcome.model, 2 * MODEL + 1)
        assert outcome.model.flags.writeable, "it belongs to the machine"
        side.handoff.dismiss({"rounds": 2})
        assert [await trainer.told(), await trainer.told()] == [
            ["counted"],
            ["left", {"rounds": 2}],
        ]
        assert await trainer.ended() == 0
        assert (side.handoff.vanished, side.handoff.late) == (0, 0)


@on_a_loop
async def test_what_was_given_does_not_change_with_the_model_it_was_taken_from():
    async with sidecar() as side:
        model = MODEL.copy()
        attachment = await in_thread(lambda: Attachment(side.address, {}))
        with attachment:
            side.start(1, model)
            task = await in_thread(attachment.next)
            model[:] = 0
            np.testing.assert_array_equal(task.model, MODEL)
            with pytest.raises(ValueError, match="read-only"):
                task.model[0] = 1
            await in_thread(attachment.commit, task)
            result = (await side.outcome()).model
            task.output[:] = -1
            assert not result.any(), "a result is not shared any more"


@on_a_loop
async def test_facts_go_both_ways_and_the_layout_is_there_to_read():
    met = []

    def admit(facts):
        met.append(facts)
        return {"hello": facts["name"]}

    async with sidecar(admit=admit) as side:
        attachment = await in_thread(lambda: Attachment(side.address, {"name": "b"}))
        with attachment:
            assert met == [{"name": "b"}]
            assert attachment.facts == {"hello": "b"}
            assert attachment.blob == b"layout"


@on_a_loop
async def test_the_private_part_stays_with_the_node():
    def train(address, add):
        with Attachment(address, {}) as attachment:
            task = attachment.next()
            before = task.private.tolist()
            task.private_output[:] = task.private + add
            return before, attachment.commit(task)

    async with sidecar(private=3) as side:
        for round, add, before in ((1, 1, [0, 0, 0]), (2, 10, [1, 1, 1])):
            side.start(round)
            assert await in_thread(train, side.address, add) == (before, True)
            await side.outcome()
        assert side.handoff.private == bytes([11, 11, 11])

        def evaluate():
            with Attachment(side.address, {}) as attachment:
                model, private = attachment.fetch()
                return model.copy(), private.tolist()

        model, private = await in_thread(evaluate)
        np.testing.assert_array_equal(model, 3 * MODEL)
        assert private == [11, 11, 11]


@on_a_loop
async def test_who_only_looks_at_the_model_does_not_disturb_the_trainer():
    async with sidecar() as side:
        side.start()
        with await in_thread(lambda: Attachment(side.address, {})) as trainer:
            task = await in_thread(trainer.next)
            with await in_thread(lambda: Attachment(side.address, {})) as other:
                await in_thread(other.fetch)
                np.testing.assert_array_equal(task.model, MODEL)
                task.output[:] = 5
                assert await in_thread(trainer.commit, task)
        assert (await side.outcome()).model[0] == 5


@on_a_loop
async def test_a_failure_is_told():
    async with sidecar() as side:
        side.start()
        with await in_thread(lambda: Attachment(side.address, {})) as trainer:
            task = await in_thread(trainer.next)
            assert await in_thread(trainer.fail, task, "ValueError: no data")
            assert await side.outcome() == Outcome(error="ValueError: no data")


# --- death ----------------------------------------------------------------------------------------


@pytest.mark.slow
@on_a_loop
async def test_a_task_whose_trainer_is_killed_goes_to_the_next():
    async with sidecar() as side:
        side.start(7)
        first = Process(side.address, TRAIN)
        assert await first.told() == ["got", 7, 107, 1]
        first.kill()
        assert await first.ended() == -signal.SIGKILL
        second = Process(side.address, TRAIN)
        assert await second.told() == ["got", 7, 107, 2]
        assert side.handoff.vanished == 1
        second.kill()
        await second.ended()
        third = Process(side.address, TRAIN)
        assert await third.told() == ["got", 7, 107, 3], "the same round and seed"
        third.go_on()
        np.testing.assert_array_equal((await side.outcome()).model, MODEL + 1)
        assert side.handoff.vanished == 2
        side.handoff.dismiss({})
        assert await third.ended() == 0


WRITE = """
attachment = Attachment(sys.argv[1], {})
task = attachment.next()
task.output[:] = -7
tell("written")
sys.stdin.readline()
"""


@pytest.mark.slow
@on_a_loop
async def test_what_a_dead_trainer_has_written_counts_for_nothing():
    async with sidecar() as side:
        side.start()
        first = Process(side.address, WRITE)
        await first.told()
        first.kill()
        await first.ended()
        second = Process(side.address, TRAIN)
        await second.told()
        second.go_on()
        np.testing.assert_array_equal((await side.outcome()).model, MODEL + 1)
        side.handoff.dismiss({})
        await second.ended()


@on_a_loop
async def test_the_end_of_the_connection_counts_and_not_that_of_the_process():
    async with sidecar() as side:
        side.start()
        first = await in_thread(lambda: Attachment(side.address, {}))
        task = await in_thread(first.next)
        memory = task.output
        first.close()  # and the process, which is this one, lives on
        with await in_thread(lambda: Attachment(side.address, {})) as second:
            again = await in_thread(second.next)
            assert (again.round, again.generation) == (1, 2)
            again.output[:] = 1
            memory[:] = 9
            assert await in_thread(second.commit, again)
        assert (await side.outcome()).model[0] == 1


@on_a_loop
async def test_a_trainer_that_comes_takes_the_place_of_one_that_hangs():
    async with sidecar() as side:
        side.start()
        hanging = await in_thread(lambda: Attachment(side.address, {}))
        old = await in_thread(hanging.next)
        with hanging, await in_thread(lambda: Attachment(side.address, {})) as fresh:
            new = await in_thread(fresh.next)
            assert (new.seed, new.generation) == (old.seed, 2)
            old.output[:] = 1
            assert not await in_thread(hanging.commit, old), "its generation is past"
            assert await in_thread(hanging.next) is None
            assert hanging.farewell == {"reason": f"process {os.getpid()} has taken its place"}
            new.output[:] = 2
            assert await in_thread(fresh.commit, new)
        assert (await side.outcome()).model[0] == 2
        assert side.outcomes.empty()


FORK = """
import os
attachment = Attachment(sys.argv[1], {})
task = attachment.next()
if os.fork():
    tell("forked")
sys.stdin.readline()  # both wait; the child also once its parent is dead
"""


@pytest.mark.slow
@on_a_loop
async def test_a_trainers_children_do_not_hide_its_death():
    async with sidecar() as side:
        side.start()
        first = Process(side.address, FORK)
        assert await first.told() == ["forked"]
        first.kill()
        assert await in_thread(first.process.wait) == -signal.SIGKILL
        with await in_thread(lambda: Attachment(side.address, {})) as second:
            while not side.handoff.vanished:
                await asyncio.sleep(0)
            assert (await in_thread(second.next)).generation == 2
        await first.ended()


SERVE = """
import asyncio
from flwr_decentral.channel.clock import LoopClock
from flwr_decentral.channel.handoff import Handoff, Slots
from flwr_decentral.channel.trainer import Task
from flwr_decentral.localsocket import Listener
async def main():
    clock, model = LoopClock(asyncio.get_running_loop()), np.zeros(4, np.float32)
    handoff = Handoff(Slots(size=4), Listener(sys.argv[1]), clock, 10**11, lambda: model)
    handoff.open()
    handoff.start(Task(round=1, seed=2, model=model), lambda outcome: None)
    tell("open")
    await asyncio.Event().wait()
asyncio.run(main())
"""


@pytest.mark.slow
@on_a_loop
async def test_a_trainer_notices_that_the_sidecar_was_killed():
    async with asyncio.timeout(DEADLINE_S):
        address = f"@flwr-decentral-test-{os.getpid()}"
        side = Process(address, SERVE)
        assert await side.told() == ["open"]
        with await in_thread(lambda: Attachment(address, {})) as trainer:
            task = await in_thread(trainer.next)
            side.kill()
            await side.ended()
            task.output[:] = task.model + 1  # the memory is still there
            with pytest.raises(RuntimeFault, match=f"the sidecar at {address} has ended"):
                await in_thread(trainer.commit, task)
        with pytest.raises(RuntimeFault, match="no sidecar listens at .* running on this host"):
            await in_thread(lambda: Attachment(address, {}, patience=0.0))


@pytest.mark.slow
@on_a_loop
async def test_a_trainer_that_waits_notices_that_the_sidecar_was_killed():
    async with asyncio.timeout(DEADLINE_S):
        address = f"@flwr-decentral-test-{os.getpid()}"
        side = Process(address, SERVE)
        await side.told()
        with await in_thread(lambda: Attachment(address, {})) as trainer:
            await in_thread(trainer.commit, await in_thread(trainer.next))
            waiting = in_thread(trainer.next)
            side.kill()
            await side.ended()
            with pytest.raises(RuntimeFault, match="has ended"):
                await waiting


# --- deadlines and aborts -------------------------------------------------------------------------


@on_a_loop
async def test_a_task_that_nobody_takes_is_lost_at_its_deadline():
    async with sidecar() as side:
        side.start(3)
        side.clock.advance(PATIENCE - 1)
        assert side.outcomes.empty()
        side.clock.advance(PATIENCE)
        error = "round 3 was not trained within 60 s: no trainer is attached"
        assert await side.outcome() == Outcome(error=error, lost=True)


@on_a_loop
async def test_a_result_after_the_deadline_is_late_and_the_next_task_is_taken():
    async with sidecar() as side:
        side.start(1)
        with await in_thread(lambda: Attachment(side.address, {})) as trainer:
            task = await in_thread(trainer.next)
            side.clock.advance(PATIENCE)
            outcome = await side.outcome()
            assert outcome.lost
            assert f"process {os.getpid()} is still at it" in outcome.error
            side.start(2)
            assert not await in_thread(trainer.commit, task)
            assert side.handoff.late == 1
            task = await in_thread(trainer.next)
            assert (task.round, task.generation) == (2, 2)
            assert await in_thread(trainer.commit, task)
        assert (await side.outcome()).model is not None
        side.clock.advance(10 * PATIENCE)
        assert side.outcomes.empty(), "the deadline ends with the task"


@on_a_loop
async def test_an_old_result_is_not_taken_for_a_new_one():
    async with sidecar() as side:
        with await in_thread(lambda: Attachment(side.address, {})) as trainer:
            side.start(1)
            first = await in_thread(trainer.next)
            assert await in_thread(trainer.commit, first)
            side.start(2)
            second = await in_thread(trainer.next)
            assert not await in_thread(trainer.commit, first)
            assert not await in_thread(trainer.fail, first, "too late")
            assert await in_thread(trainer.commit, second)
        assert side.outcomes.qsize() == 2


@on_a_loop
async def test_a_task_that_is_forgotten_is_not_answered():
    async with sidecar() as side:
        side.start(1)
        with await in_thread(lambda: Attachment(side.address, {})) as trainer:
            task = await in_thread(trainer.next)
            side.handoff.cancel()
            assert not await in_thread(trainer.commit, task)
        side.clock.advance(10 * PATIENCE)
        assert side.outcomes.empty()


@on_a_loop
async def test_a_process_that_is_asked_to_stop_does_so_while_it_waits(monkeypatch):
    monkeypatch.setattr(client, "SLICE_S", 0.01)
    asked = threading.Event()
    async with sidecar() as side:
        make = lambda: Attachment(side.address, {}, abort=asked.is_set)  # noqa: E731
        with await in_thread(make) as trainer:
            waiting = in_thread(trainer.next)
            asked.set()
            with pytest.raises(Aborted, match="asked to stop"):
                await waiting
        with pytest.raises(Aborted):
            await in_thread(make)
        nowhere = f"@flwr-decentral-nowhere-{os.getpid()}"
        with pytest.raises(Aborted):
            await in_thread(lambda: Attachment(nowhere, {}, patience=99, abort=asked.is_set))


def test_no_wait_is_longer_than_a_second():
    assert client.SLICE_S <= 1


@on_a_loop
async def test_a_trainer_waits_for_a_sidecar_that_is_about_to_start():
    async with asyncio.timeout(DEADLINE_S):
        address = f"@flwr-decentral-test-{os.getpid()}"
        tried = threading.Event()

        def abort():
            tried.set()
            return False

        waiting = in_thread(lambda: Attachment(address, {}, abort=abort))
        await in_thread(tried.wait)
        handoff = Handoff(
            Slots(size=4), Listener(address), ManualClock(), PATIENCE, lambda: MODEL[:4]
        )
        handoff.open()
        (await waiting).close()
        await handoff.close()


@on_a_loop
async def test_only_those_leave_who_were_there_when_a_segment_ended():
    async with sidecar() as side:
        with await in_thread(lambda: Attachment(side.address, {})) as old:
            side.handoff.dismiss({"segment": 1})
            with await in_thread(lambda: Attachment(side.address, {})) as new:
                assert await in_thread(old.next) is None
                assert old.farewell == {"segment": 1}
                assert await in_thread(old.next) is None
                side.start()
                assert (await in_thread(new.next)).round == 1


# --- strangers ------------------------------------------------------------------------------------


@pytest.mark.parametrize("fault", [ConfigurationError, RuntimeFault])
@on_a_loop
async def test_a_process_that_is_refused_learns_why(fault):
    def admit(facts):
        raise fault(f"run {facts['run']} is not ours")

    async with sidecar(admit=admit) as side:
        with pytest.raises(fault, match="run 7 is not ours"):
            await in_thread(lambda: Attachment(side.address, {"run": 7}))
        assert side.handoff.strangers == 1


@on_a_loop
async def test_another_version_is_refused(monkeypatch):
    monkeypatch.setattr(client, "HANDOFF", 9)
    async with sidecar() as side:
        with pytest.raises(RuntimeFault, match="speaks version 9 .* the sidecar version 1"):
            await in_thread(lambda: Attachment(side.address, {}))


@on_a_loop
async def test_another_user_is_not_trusted(monkeypatch):
    monkeypatch.setattr(asking, "is_own", lambda socket: False)
    async with sidecar() as side:
        with pytest.raises(RuntimeFault, match="another user's"):
            await in_thread(lambda: Attachment(side.address, {}))


@on_a_loop
async def test_another_user_is_not_served(monkeypatch):
    monkeypatch.setattr(module, "is_own", lambda socket: False)
    async with sidecar() as side:
        with pytest.raises(RuntimeFault, match="has ended"):
            await in_thread(lambda: Attachment(side.address, {}))
        assert side.handoff.strangers == 1


@pytest.mark.parametrize(
    ("frames", "reason"),
    [
        ([{"do": "next"}], "says 'next' before it has attached"),
        ([{"x": 1}], "says None before it has attached"),
        ([b"\xff" * 100], "claims a header"),
        ([{"do": "attach", "version": 1}, {"do": "attach"}], "says 'attach' twice"),
        ([{"do": "attach", "version": 1}, {"do": "sing"}], "says 'sing', which is no message"),
    ],
)
@on_a_loop
async def test_nonsense_is_refused_and_harms_nobody(frames, reason):
    async with sidecar() as side:
        side.start()
        with await in_thread(lambda: Attachment(side.address, {})) as trainer:
            task = await in_thread(trainer.next)
            data = b"".join(f if isinstance(f, bytes) else encode_frame(f) for f in frames)
            answer = await in_thread(exchange, side.address, data)
            assert reason.encode() in answer
            assert await in_thread(trainer.commit, task)
        await side.outcome()


def exchange(address, data) -> bytes:
    """Send bytes to a sidecar; return all that it says until it hangs up."""
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(DEADLINE_S)
        connection.connect(f"\0{address[1:]}")
        connection.sendall(data)
        answer = b""
        with contextlib.suppress(ConnectionResetError):
            while part := connection.recv(1 << 16):
                answer += part
        return answer


@on_a_loop
async def test_who_does_not_say_who_it_is_is_hung_up_on(monkeypatch):
    monkeypatch.setattr(module, "PATIENCE_S", 0.01)
    async with sidecar() as side:
        assert await in_thread(exchange, side.address, b"") == b""


@on_a_loop
async def test_nothing_is_left_open():
    before = len(os.listdir("/proc/self/fd"))
    async with sidecar() as side:
        inside = len(os.listdir("/proc/self/fd"))
        for _ in range(3):
            side.start()
            with await in_thread(lambda: Attachment(side.address, {})) as trainer:
                await in_thread(trainer.commit, await in_thread(trainer.next))
            await side.outcome()
        with pytest.raises(RuntimeFault):
            await in_thread(lambda: Attachment("@nobody", {}, patience=0.0))
        while len(os.listdir("/proc/self/fd")) > inside:
            await asyncio.sleep(0)  # until the sidecar has noticed
    assert len(os.listdir("/proc/self/fd")) <= before + 3, "the loop's own, until it is closed"
