"""The compiled backend, on each instruction set and with several threads."""

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from flwr_decentral.core import ConfigurationError, Contiguous, Layerwise, Rotation, RuntimeFault
from flwr_decentral.ops import Piece, Reference, choose
from flwr_decentral.testing.backends import BackendConformance, assert_same_bits, draw
from flwr_decentral_kernels import Native, library, native
from flwr_decentral_kernels.memory import Pool

from .conftest import LIBRARY


def _usable():
    try:
        usable = library.load().fdk_isas()
    except ConfigurationError:
        return []
    return [isa for isa, number in native.ISAS.items() if usable >> number & 1]


ISAS = _usable()
pytestmark = pytest.mark.skipif(not ISAS, reason="the kernels were installed without a compiler")

# How work is shared out does not depend on the instruction set.
COMBINATIONS = [
    *((isa, 1) for isa in ISAS),
    *((isa, threads) for isa in ISAS[-1:] for threads in (2, 3)),
]

CANARY = np.float32(-54321.5)


class GuardedPool(Pool):
    """Memory with canaries on either side, which are looked after whenever more is asked for."""

    def __init__(self):
        super().__init__()
        self.wholes = []

    def empty_bytes(self, size):
        self.look()
        whole = np.frombuffer(np.tile(CANARY, size // 4 + 65).tobytes(), np.uint8).copy()
        # Bytes need not end where a float does.
        self.wholes = [*self.wholes[-30:], (whole, whole.copy(), size)]
        return whole[128 : 128 + size]

    def look(self):
        for whole, untouched, size in self.wholes:
            assert_same_bits(whole[:128], untouched[:128])
            assert_same_bits(whole[128 + size :], untouched[128 + size :])


def _guarded(**options):
    backend = Native(threaded_from=0, **options)
    backend._pool = GuardedPool()
    return backend


@pytest.mark.slow
class TestBest(BackendConformance):
    @pytest.fixture(scope="class")
    @classmethod
    def ops(cls):
        backend = _guarded()
        yield backend
        backend._pool.look()


@pytest.mark.slow
class TestEach(BackendConformance):
    @pytest.fixture(scope="class", params=COMBINATIONS, ids=str)
    @classmethod
    def ops(cls, request):
        isa, threads = request.param
        backend = _guarded(isa=isa, threads=threads)
        yield backend
        backend._pool.look()


def test_an_instruction_set_is_used_where_all_of_it_is_there():
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        pytest.skip("nothing says what this processor has")
    flags = next((set(line.split()) for line in lines if line.startswith("flags")), set())
    v2 = {"pni", "ssse3", "sse4_1", "sse4_2", "popcnt", "cx16", "lahf_lm"}
    v3 = v2 | {"avx", "avx2", "bmi1", "bmi2", "f16c", "fma", "abm", "movbe"}
    known = [name for name, all_of_it in (("v2", v2), ("v3", v3)) if all_of_it <= flags]
    assert [isa.removeprefix("x86-64-") for isa in ISAS[1:]] == known


@pytest.mark.parametrize("threads", [2, 3, 64])
def test_threads_do_not_change_a_bit(threads):
    x, y, z = draw(1, 3, 70_001)
    one, many = Native(), Native(threads=threads, threaded_from=0)
    for granularity in (1, 4, 64):
        partition = Rotation(len(x), fragments=7, granularity=granularity, seed=5)
        payloads = many.pack_all(y, partition)
        for each, other in zip(payloads, one.pack_all(y, partition), strict=True):
            assert_same_bits(each, other)
        assert_same_bits(many.assemble(partition, payloads), y)
        pieces = [Piece(k, payloads[k]) for k in (0, 3, 3, 5)]
        numbers = [np.nan_to_num(each) for each in (x, *payloads)]
        pieces = [Piece(k, numbers[1 + k]) for k, _ in pieces]
        assert_same_bits(
            many.average(numbers[0], partition, pieces), one.average(numbers[0], partition, pieces)
        )
    for wire in ("bfloat16", "float16", "int8"):
        assert_same_bits(many.encode(z, wire), one.encode(z, wire))
    assert many.finite(y) is False


def test_what_lies_at_an_odd_address_is_read_all_the_same():
    ops, (x, y) = Native(), draw(2, 2, 501, odd=False)
    odd, odd_y = (np.frombuffer(b"." + each.tobytes(), np.float32, offset=1) for each in (x, y))
    assert not odd.flags.aligned
    assert not odd_y.flags.aligned
    assert_same_bits(ops.mix(odd, y, 0.3)[0], ops.mix(x, y, 0.3)[0])
    assert_same_bits(ops.update(odd, odd_y, x), ops.update(x, y, x))
    assert_same_bits(ops.pairwise(odd, odd_y, x, 0.3), ops.pairwise(x, y, x, 0.3))
    assert_same_bits(ops.combine([y, odd], [1.0, 2.0]), ops.combine([y, x], [1.0, 2.0]))
    partition = Rotation(501, 3, 4)
    payloads = Reference().pack_all(y, partition)
    for each, payload in zip(ops.pack_all(odd_y, partition), payloads, strict=True):
        assert_same_bits(each, payload)
    assert_same_bits(ops.pack(odd_y, partition, 1), payloads[1])
    pieces = [Piece(0, odd[: partition.length(0)])]
    expected = Reference().average(y, partition, pieces)
    assert_same_bits(ops.average(odd_y, partition, pieces), expected)
    target = np.frombuffer(bytearray(2005), np.float32, offset=1)
    assert ops.average(y, partition, pieces, out=target) is target
    assert_same_bits(target, expected)
    assert ops.combine([x, y], [1.0, 2.0], out=target) is target
    assert_same_bits(target, ops.combine([x, y], [1.0, 2.0]))


def test_another_precision_is_refused_though_the_reference_knows_it():
    ops, x, partition = Native(), np.ones(40), Rotation(40, 2, 4)
    out = np.zeros(40)
    for call in (
        lambda: ops.combine([x, x], [1.0, 2.0], out=out),
        lambda: ops.mix(x, x, 0.5),
        lambda: ops.pack(x, partition, 0),
        lambda: ops.pack_all(x, partition),
        lambda: ops.assemble(partition, [x[:20], x[20:]]),
        lambda: ops.average(x, partition, [Piece(0, x[:20])], out=out),
        lambda: ops.finite(x),
        lambda: ops.encode(x, "int8"),
    ):
        with pytest.raises(TypeError, match="float64"):
            call()
    assert not out.any()


def test_partitions_without_native_code_go_to_the_reference(monkeypatch):
    ops, x = Native(), np.arange(60, dtype=np.float32)
    monkeypatch.setattr(ops, "_call", lambda *_: pytest.fail("the library was called"))

    class Stranger(Rotation):
        """Would be misread as what it derives from."""

    for partition in (Layerwise([40, 20], 3), Contiguous(60, 3), Stranger(60, 3, 4)):
        payloads = ops.pack_all(x, partition)
        assert_same_bits(ops.pack(x, partition, 1), payloads[1])
        assert_same_bits(ops.assemble(partition, payloads), x)
        pieces = [Piece(1, payloads[1])]
        assert_same_bits(
            ops.average(x, partition, pieces), Reference().average(x, partition, pieces)
        )


def test_partitions_that_the_library_cannot_count_go_to_the_reference():
    assert native._shape(Rotation(2**36, 2**6, 2**24)) is not None
    assert native._shape(Rotation(2**36, 2**7, 2**24)) is None
    assert native._shape(Rotation(2**36, 1, 1)) is None


def test_a_buffer_is_used_again_once_nobody_holds_it():
    pool = Pool()
    one = pool.empty(2**20)
    address = one.ctypes.data
    part = one[5:10]
    del one
    assert pool.empty(2**20).ctypes.data != address
    del part
    assert address in [pool.empty(2**20).ctypes.data, pool.empty(2**20).ctypes.data]


def test_a_pool_is_bounded():
    pool = Pool(most=2**23)

    def use(size, count):
        held = [pool.empty_bytes(size) for _ in range(count)]
        del held
        return {size: len(waiting) for size, waiting in pool._waiting.items() if waiting}

    assert use(2**21, 9) == {2**21: 4}
    assert use(2**22, 1) == {2**21: 2, 2**22: 1}
    # What is used again is the last to be given up.
    assert use(2**21, 1) == {2**22: 1, 2**21: 2}
    assert use(2**20, 1) == {2**21: 2, 2**20: 1}
    # Of a large size two are kept, and nothing else.
    assert use(2**24, 3) == {2**24: 2}
    assert use(2**20, 1) == {2**20: 1}


def test_a_pool_keeps_its_bounds_in_threads():
    pool = Pool(most=2**23)

    def work(seed):
        for size in np.random.default_rng(seed).integers(1, 7, 300):
            array = pool.empty_bytes(int(size) << 20)
            array[:1] = seed
            assert array[0] == seed

    with ThreadPoolExecutor(8) as threads:
        list(threads.map(work, range(8)))
    pool.empty_bytes(2**20)
    assert sum(size * len(waiting) for size, waiting in pool._waiting.items()) <= 2**23


def test_the_environment_decides(monkeypatch):
    monkeypatch.setenv("FLWR_DECENTRAL_OPS", "native")
    monkeypatch.setenv("FLWR_DECENTRAL_KERNELS_ISA", ISAS[0])
    monkeypatch.setenv("FLWR_DECENTRAL_KERNELS_THREADS", "3")
    ops = choose()
    assert isinstance(ops, Native)
    assert ops.describe() == f"compiled for {ISAS[0]}, 3 threads"


@pytest.mark.parametrize(
    ("variable", "value", "text"),
    [
        ("FLWR_DECENTRAL_KERNELS_ISA", "avx", "'avx' here .*known: baseline"),
        ("FLWR_DECENTRAL_KERNELS_THREADS", "many", "1 to 64 threads, got 'many'"),
        ("FLWR_DECENTRAL_KERNELS_THREADS", "0", "1 to 64 threads, got '0'"),
        ("FLWR_DECENTRAL_KERNELS_THREADS", "65", "1 to 64 threads, got '65'"),
    ],
)
def test_a_setting_out_of_range_is_refused(monkeypatch, variable, value, text):
    monkeypatch.setenv(variable, value)
    with pytest.raises(ConfigurationError, match=text):
        Native()


def test_a_missing_library_is_said(monkeypatch):
    monkeypatch.setattr(library, "resource", lambda name: None)
    with pytest.raises(ConfigurationError, match="no C.. compiler.*install it again"):
        library.load.__wrapped__()


def test_a_library_that_is_none_is_said(monkeypatch, tmp_path):
    path = tmp_path / library.LIBRARY
    path.write_bytes(b"not a library")
    monkeypatch.setattr(library, "resource", lambda name: path)
    with pytest.raises(ConfigurationError, match="cannot be used here.*install it again"):
        library.load.__wrapped__()


def test_a_refusal_by_the_library_is_an_error():
    library.load()
    with pytest.raises(RuntimeFault, match="a bad partition"):
        library.check(-2)
    with pytest.raises(MemoryError):
        library.check(-7)


@pytest.mark.skipif(bool(LIBRARY), reason="not the library that is installed")
def test_the_library_asks_for_nothing_but_libc():
    path = library.resource(library.LIBRARY)
    shown = subprocess.run(["ldd", path], capture_output=True, text=True, check=False)
    if shown.returncode:
        pytest.skip("there is no ldd here")
    needed = [Path(line.split()[0]).name for line in shown.stdout.splitlines()]
    allowed = ("linux-vdso", "libc.", "ld-linux", "libm.", "libpthread.")
    assert all(name.startswith(allowed) for name in needed), needed


@pytest.mark.slow
def test_a_forked_process_can_use_threads():
    code = (
        "import os, sys, numpy as np\n"
        "from flwr_decentral_kernels import Native\n"
        "ops = Native(threads=2, threaded_from=0)\n"
        "x = np.ones(100_000, np.float32)\n"
        "ops.combine([x, x], [1.0, 2.0])\n"
        "child = os.fork()\n"
        "if not child:\n"
        "    os._exit(0 if (ops.combine([x, x], [1.0, 2.0]) == 3).all() else 1)\n"
        "sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))\n"
    )
    subprocess.run([sys.executable, "-W", "ignore", "-c", code], check=True, timeout=60)


@pytest.mark.slow
@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize(("granularity", "threads"), [(1, 1), (4, 1), (64, 1), (64, 3), (1024, 1)])
def test_what_is_too_large_for_a_cache_has_the_same_bits(isa, granularity, threads):
    """Results of such a size are written past the caches, if they lie in the backend's memory."""
    size = 2**23 + 12_345
    x = np.random.default_rng(1).standard_normal(size, dtype=np.float32)
    partition = Rotation(size, 10, granularity)
    backend = Native(isa=isa, threads=threads)
    fragments = backend.pack_all(x, partition)
    assert all(each.__array_interface__["data"][0] % 64 == 0 for each in fragments)
    for fragment in range(10):
        assert_same_bits(fragments[fragment], x[partition.indices(fragment)])
    assert_same_bits(backend.assemble(partition, fragments), x)
