"""The arena: whose bytes are whose, in this process and in others, and what can go wrong."""

import errno
import fcntl
import mmap
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from flwr_decentral import arena as module
from flwr_decentral.arena import Arena, ArenaRef, available_memory, sweep
from flwr_decentral.core import RuntimeFault

needs_memory_files = pytest.mark.skipif(
    not hasattr(os, "memfd_create"), reason="memory files are a Linux thing"
)


@pytest.fixture
def make():
    """Make arenas that are closed at the end."""
    made = []

    def create(*arguments, **keywords):
        made.append(Arena.create(*arguments, **keywords))
        return made[-1]

    yield create
    for arena in made:
        arena.close()


def views(arena):
    """List a name, and every part of the arena."""
    for node in range(arena.nodes):
        yield f"input {node}", arena.input(node)
        yield f"output {node}", arena.output(node)
        yield f"private input {node}", arena.private_input(node)
        yield f"private output {node}", arena.private_output(node)


# --- rows -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("nodes", [1, 5])
@pytest.mark.parametrize("size", [0, 1, 16, 37, 5000])
@pytest.mark.parametrize("private", [0, 1, 64, 129])
@pytest.mark.parametrize("blob", [b"", b"x", bytes(range(256)) * 3])
def test_rows_are_aligned_disjoint_and_begin_as_zeros(make, nodes, size, private, blob):
    arena = make(nodes, size, private, blob)
    assert (arena.nodes, arena.size, arena.private_bytes) == (nodes, size, private)
    parts = dict(views(arena))
    for number, view in enumerate(parts.values(), 1):
        assert not view.any()
        assert view.shape == ((size,) if view.dtype == np.float32 else (private,))
        assert not view.size or view.ctypes.data % 64 == 0
        view[:] = number
    for number, view in enumerate(parts.values(), 1):
        assert (view == number).all(), "no part is written to through another"
    assert arena.blob == blob
    assert Arena.attach(arena.ref).nodes == nodes, "the header is still there"


@pytest.mark.parametrize("node", [-1, 3, 99])
@pytest.mark.parametrize("view", ["input", "output", "private_input", "private_output"])
def test_there_is_no_such_node(make, view, node):
    arena = make(3, 10, 10)
    with pytest.raises(IndexError, match=f"node {node} is not in 0..2"):
        getattr(arena, view)(node)


def test_views_are_of_one_memory(make):
    arena = make(2, 4)
    arena.input(1)[:] = [1, 2, 3, 4]
    assert arena.input(1).tolist() == [1, 2, 3, 4]
    other = Arena.attach(arena.ref)
    other.input(1)[2] = 9
    assert arena.input(1).tolist() == [1, 2, 9, 4]
    other.close()
    assert arena.input(1).tolist() == [1, 2, 9, 4]


# --- other processes ------------------------------------------------------------------------------

WORKER = """
import sys
import numpy as np
from flwr_decentral.arena import Arena, ArenaRef
arena = Arena.attach(ArenaRef(*sys.argv[1:]))
for node in range(arena.nodes):
    arena.output(node)[:] = arena.input(node) * np.float32(2)
    arena.private_output(node)[:] = arena.private_input(node)[::-1]
sys.stdout.write(arena.blob.decode())
"""


def run_python(code, *arguments):
    return subprocess.run(
        [sys.executable, "-c", code, *arguments],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.slow
def test_round_trip_to_another_process(make):
    arena = make(3, 1001, 5, b"das Modell")
    for node in range(3):
        arena.input(node)[:] = np.arange(1001, dtype=np.float32) + node
        arena.private_input(node)[:] = [1, 2, 3, 4, node]
    done = run_python(WORKER, arena.ref.path, arena.ref.token)
    assert (done.stdout, done.stderr) == ("das Modell", "")
    for node in range(3):
        np.testing.assert_array_equal(arena.output(node), 2 * arena.input(node))
        assert arena.private_output(node).tolist() == [node, 4, 3, 2, 1]


CREATOR = """
import sys
from flwr_decentral.arena import Arena
arena = Arena.create(1, 10)
print(arena.ref.path, arena.ref.token, flush=True)
sys.stdin.read()
"""


@pytest.mark.slow
@needs_memory_files
def test_the_arena_of_a_dead_process_cannot_be_opened():
    path, token = run_python(CREATOR).stdout.split()
    with pytest.raises(RuntimeFault, match=f"memory at {path}: No such file.*made it has ended"):
        Arena.attach(ArenaRef(path, token))


@pytest.mark.slow
@needs_memory_files
def test_what_a_process_has_mapped_outlives_the_creator():
    with subprocess.Popen(
        [sys.executable, "-c", CREATOR], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as creator:
        arena = Arena.attach(ArenaRef(*creator.stdout.readline().split()))
    assert creator.returncode == 0
    arena.input(0)[:] = 7
    assert arena.input(0).tolist() == [7] * 10
    arena.close()


def test_another_arena_is_refused(make):
    first, second = make(1, 10), make(1, 10)
    assert first.ref.token != second.ref.token
    assert int(first.ref.token, 16).bit_length() <= 128
    with pytest.raises(RuntimeFault, match="not this run's shared memory: it was left by another"):
        Arena.attach(ArenaRef(second.ref.path, first.ref.token))


@pytest.mark.parametrize("content", [b"x", b"something else entirely" * 100])
def test_what_is_no_arena_is_refused(tmp_path, content):
    path = tmp_path / "file"
    path.write_bytes(content)
    with pytest.raises(RuntimeFault, match="not this run's shared memory"):
        Arena.attach(ArenaRef(str(path), "00" * 16))


def test_what_cannot_be_mapped_is_refused(tmp_path):
    (tmp_path / "empty").touch()
    with pytest.raises(RuntimeFault, match="cannot map the run's shared memory"):
        Arena.attach(ArenaRef(str(tmp_path / "empty"), "00" * 16))
    with pytest.raises(RuntimeFault, match="cannot open the run's shared memory"):
        Arena.attach(ArenaRef(str(tmp_path), "00" * 16))


# --- descriptors that are passed ------------------------------------------------------------------


def test_a_descriptor_is_as_good_as_a_path(make):
    arena = make(2, 10, 3, b"blob")
    arena.input(1)[:] = 5
    other = Arena.receive(os.dup(arena.fileno()), arena.ref.token)
    assert (other.nodes, other.size, other.private_bytes, other.blob) == (2, 10, 3, b"blob")
    other.output(1)[:] = other.input(1) + 1
    assert arena.output(1).tolist() == [6] * 10
    with pytest.raises(ValueError, match="no descriptor"):
        other.fileno()
    other.close()


@needs_memory_files
def test_nobody_can_change_the_length_of_an_arena(make):
    arena = make(1, 10)
    for size in (0, 1 << 20):
        with pytest.raises(PermissionError):
            os.ftruncate(arena.fileno(), size)
    with pytest.raises(PermissionError):
        fcntl.fcntl(arena.fileno(), fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE)


@needs_memory_files
def test_memory_that_its_maker_could_cut_short_is_refused(make):
    before = descriptors()
    fd = os.memfd_create("test", os.MFD_ALLOW_SEALING)
    os.truncate(fd, 4096)
    with pytest.raises(RuntimeFault, match="not sealed"):
        Arena.receive(fd, "00" * 16)
    arena = make(1, 10)
    with pytest.raises(RuntimeFault, match="is not this run's shared memory"):
        Arena.receive(os.dup(arena.fileno()), "00" * 16)
    arena.close()
    assert descriptors() == before, "what is refused is closed"


# --- memory ---------------------------------------------------------------------------------------

BIG = "8 MiB of shared memory for 4 nodes with 262144 shared parameters and 1000 private bytes"


def test_a_lack_of_memory_is_told_before_anything_is_allocated(monkeypatch):
    monkeypatch.setattr(module, "available_memory", lambda: 5 << 20)
    monkeypatch.setattr(module, "_open_new", None)
    with pytest.raises(RuntimeFault, match=f"cannot allocate {BIG} each: only 5 MiB are avail"):
        Arena.create(4, 1 << 18, 1000)


def test_memory_that_just_suffices(monkeypatch):
    needed = 64 + 2 * 4096
    monkeypatch.setattr(module, "available_memory", lambda: needed)
    Arena.create(1, 1024).close()
    monkeypatch.setattr(module, "available_memory", lambda: needed - 1)
    with pytest.raises(RuntimeFault, match="only 0 MiB"):
        Arena.create(1, 1024)


def test_unknown_memory_is_no_obstacle(monkeypatch):
    monkeypatch.setattr(module, "available_memory", lambda: None)
    Arena.create(1, 10).close()


def descriptors() -> set[str]:
    return set(os.listdir("/proc/self/fd"))


def mappings(inode: int) -> int:
    """Count how often this process maps a file."""
    return sum(f" {inode} " in line for line in Path("/proc/self/maps").read_text().splitlines())


@needs_memory_files
@pytest.mark.parametrize(
    ("function", "verb"), [("os.posix_fallocate", "allocate"), ("mmap.mmap", "map")]
)
def test_a_failed_allocation_is_told_and_leaves_nothing_open(monkeypatch, function, verb):
    def fail(*_):
        raise OSError(errno.ENOMEM, "Cannot allocate memory")

    before = descriptors()
    monkeypatch.setattr(function, fail)
    with pytest.raises(RuntimeFault, match=f"cannot {verb} {BIG} each: Cannot allocate memory"):
        Arena.create(4, 1 << 18, 1000)
    monkeypatch.undo()
    assert descriptors() == before


@needs_memory_files
def test_memory_is_allocated_and_not_just_promised(make):
    arena = make(16, 100_000)
    status = os.stat(arena.ref.path)
    assert status.st_blocks * 512 >= status.st_size > 16 * 2 * 400_000


def test_the_tighter_of_machine_and_control_group_counts(monkeypatch, tmp_path):
    meminfo = tmp_path / "meminfo"
    meminfo.write_text("MemTotal:  90 kB\nMemFree: 10 kB\nMemAvailable:   60 kB\n")
    monkeypatch.setattr(module, "_MEMINFO", meminfo)
    monkeypatch.setattr(module, "_CGROUP", tmp_path)
    assert available_memory() == 60 * 1024
    for limit, expected in [("40960", 40_960 - 30_000 + 5_000), ("max", 61_440), ("9", 0)]:
        (tmp_path / "memory.max").write_text(limit)
        (tmp_path / "memory.current").write_text("30000\n")
        (tmp_path / "memory.stat").write_text("anon 25000\ninactive_file 5000\nslab 1\n")
        assert available_memory() == expected
    (tmp_path / "memory.max").write_text("99999999")
    assert available_memory() == 61_440
    meminfo.unlink()
    assert available_memory() == 99_999_999 - 25_000


def test_memory_is_unknown_where_nothing_tells(monkeypatch, tmp_path):
    monkeypatch.setattr(module, "_MEMINFO", tmp_path / "none")
    monkeypatch.setattr(module, "_CGROUP", tmp_path / "none")
    assert available_memory() is None


def test_this_machine_has_memory():
    assert available_memory() is None or 0 < available_memory() < 1 << 60


# --- the end --------------------------------------------------------------------------------------


@needs_memory_files
def test_nothing_is_left_behind():
    before = descriptors()
    arena = Arena.create(4, 1000, 10)
    inode = os.stat(arena.ref.path).st_ino
    assert descriptors() > before
    assert mappings(inode) == 1
    arena.close()
    arena.close()
    assert descriptors() == before
    assert mappings(inode) == 0
    with pytest.raises(RuntimeFault, match="cannot open"):
        Arena.attach(arena.ref)


@needs_memory_files
def test_a_refused_attachment_leaves_nothing_behind(make):
    arena, before = make(1, 10), descriptors()
    inode = os.stat(arena.ref.path).st_ino
    with pytest.raises(RuntimeFault) as error:
        Arena.attach(ArenaRef(arena.ref.path, "00" * 16))
    assert error.traceback, "which keeps the frames of the call alive"
    assert descriptors() == before
    assert mappings(inode) == 1


def test_a_view_outlives_the_arena(make):
    arena = make(1, 4)
    view = arena.input(0)
    view[:] = 3
    arena.close()
    assert view.tolist() == [3] * 4


# --- where there are no memory files --------------------------------------------------------------


@pytest.fixture
def elsewhere(monkeypatch, tmp_path):
    """Pretend that this is not Linux; return the temporary directory."""
    monkeypatch.delattr(os, "memfd_create", raising=False)
    monkeypatch.delattr(os, "posix_fallocate", raising=False)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    return tmp_path


@pytest.mark.slow
def test_elsewhere_an_arena_is_a_file_that_is_removed(elsewhere):
    arena = Arena.create(2, 1 << 19)
    path = Path(arena.ref.path)
    assert path.parent == elsewhere
    assert path.stat().st_mode & 0o777 == 0o600
    assert path.stat().st_blocks * 512 >= path.stat().st_size > 4 << 21
    done = run_python(WORKER, arena.ref.path, arena.ref.token)
    assert done.returncode == 0
    arena.close()
    assert list(elsewhere.iterdir()) == []


def test_elsewhere_a_failed_allocation_leaves_no_file(elsewhere, monkeypatch):
    def fail(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    for function in ("os.pwrite", "mmap.mmap"):
        with monkeypatch.context() as patch:
            patch.setattr(function, fail)
            with pytest.raises(RuntimeFault, match="No space left"):
                Arena.create(1, 1000)
        assert list(elsewhere.iterdir()) == []


def dead_pid() -> int:
    """Find the id of a process that has ended."""
    return int(run_python("import os; print(os.getpid())").stdout)


def test_files_of_dead_processes_are_swept(elsewhere):
    prefix = "flwr-decentral-arena-"
    dead = elsewhere / f"{prefix}{dead_pid()}-0a1b2c3d"
    kept = [
        elsewhere / f"{prefix}{os.getpid()}-0a1b2c3d",
        elsewhere / f"{prefix}1-0a1b2c3d",  # alive, and another user's for most
        elsewhere / f"{prefix}notes.txt",
        elsewhere / f"{dead_pid()}-0a1b2c3d",
    ]
    for path in [dead, *kept]:
        path.touch()
    assert sweep(elsewhere) == [dead]
    assert sorted(elsewhere.iterdir()) == sorted(kept)
    assert sweep(elsewhere) == []
    dead.touch()
    Arena.create(1, 1).close()
    assert sorted(elsewhere.iterdir()) == sorted(kept), "making an arena sweeps first"


def test_the_process_of_another_user_is_alive(elsewhere, monkeypatch):
    def refuse(pid, signal):
        assert signal == 0, "nobody is to be hurt"
        raise PermissionError(pid)

    (elsewhere / "flwr-decentral-arena-77-ab").touch()
    monkeypatch.setattr("os.kill", refuse)
    assert sweep(elsewhere) == []


def test_a_page_is_the_least(make):
    arena = make(1, 1)
    assert os.stat(arena.ref.path).st_size >= mmap.PAGESIZE
