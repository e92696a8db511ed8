"""What is said of processes, where Linux tells."""

import os
import subprocess
import sys

import pytest

from flwr_decentral.testing.processes import family, memory

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")

GRANDCHILD = "import time; print(flush=True); time.sleep(60)"
CHILD = f"""
import subprocess, sys
held = bytearray(40_000_000)
child = subprocess.Popen([sys.executable, "-c", {GRANDCHILD!r}], stdout=subprocess.PIPE)
child.stdout.readline()  # it has started
print(child.pid, flush=True)
child.wait()
"""


@pytest.fixture
def child():
    process = subprocess.Popen([sys.executable, "-c", CHILD], stdout=subprocess.PIPE, text=True)
    grandchild = int(process.stdout.readline())
    yield process.pid, grandchild
    os.kill(grandchild, 9)
    process.wait()
    process.stdout.close()


def test_a_family_is_a_process_and_all_below_it(child):
    mine = family()
    assert next(iter(mine)) == os.getpid()
    assert set(child) < set(mine)
    assert set(family(child[0])) == set(child)
    assert GRANDCHILD in mine[child[1]]


def test_memory_is_what_is_held(child):
    parent, below = child
    assert 40e6 < memory(parent) < 40e6 + 10 * memory(below)


def test_a_process_that_has_ended_holds_nothing():
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    assert memory(process.pid) == 0
    assert family(process.pid) == {}
