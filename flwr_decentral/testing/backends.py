"""Checks that every backend of vector arithmetic must pass: subclass, make yours, run pytest.

A whole test file of a backend:

    from flwr_decentral.testing.backends import BackendConformance
    from my_package import Mine

    class TestMine(BackendConformance):
        @pytest.fixture(scope="class")
        @classmethod
        def ops(cls):
            return Mine()

The backend is compared with :class:`~flwr_decentral.ops.Reference`, bit for bit; which NaN an
operation results in is left open, and copies keep every bit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from flwr_decentral.core import ConfigurationError
from flwr_decentral.core.fragments import Contiguous, Interleaved, Layerwise, Partition, Rotation
from flwr_decentral.core.wire import WIRES, Wire, wire_bytes
from flwr_decentral.ops import Ops, Piece, Reference
from flwr_decentral.ops.contract import Vector

REFERENCE = Reference()

some = settings(
    deadline=None,
    max_examples=15,
    suppress_health_check=[HealthCheck.differing_executors, HealthCheck.too_slow],
)
seeds = st.integers(0, 2**32)
weights = st.one_of(st.sampled_from([0.0, 0.5, 1.0, -1.0, 1 / 3]), st.floats(-10, 10))

# Sizes with and without whole vector registers, strips and the work of a second thread.
sizes = st.one_of(st.sampled_from([0, 1, 7, 8, 9, 1023, 1024, 1025, 9000]), st.integers(0, 99))

_CANARY = 12345.678
# Zeros, denormals, the edges of each form on the wire, ties, infinities and NaNs.
_ODD = np.frombuffer(
    bytes.fromhex(
        "00000000 80000000 00000001 807fffff 00800000 7f7fffff ff7fffff 7f800000 ff800000 7fc00000"
        "7f800001 ffc12345 3f808000 3f818000 3f801000 3f803000 477fefff 477ff000 387fffff 33000000"
        "33000001 33c00000 0d800000"
    ),
    ">f4",
).astype(np.float32)


def draw(seed: int, count: int, size: int, *, odd: bool = True) -> list[Vector]:
    """Make vectors of values of all magnitudes, with zeros, denormals, infinities and NaNs."""
    rng = np.random.Generator(np.random.PCG64(seed))
    vectors = []
    for _ in range(count):
        scale = np.float32(10.0 ** rng.integers(-4, 5))
        vector = rng.normal(size=size).astype(np.float32) * scale
        if odd and size:
            at = rng.integers(0, size, 1 + size // 50)
            vector[at] = rng.choice(_ODD, len(at))
        vectors.append(vector)
    return vectors


def assert_same_bits(result: NDArray[Any], expected: NDArray[Any]) -> None:
    """Demand equal bits of every value."""
    assert result.dtype == expected.dtype
    assert result.shape == expected.shape
    np.testing.assert_array_equal(result.view(np.uint8), expected.view(np.uint8))


def assert_same(result: NDArray[Any], expected: NDArray[Any]) -> None:
    """Demand equal bits of every value that is a number, and NaN where NaN is expected."""
    assert result.dtype == np.float32
    assert result.shape == expected.shape
    nan = np.isnan(expected)
    np.testing.assert_array_equal(np.isnan(result), nan)
    number = result.view(np.uint32)[~nan], expected.view(np.uint32)[~nan]
    np.testing.assert_array_equal(*number)


@st.composite
def rotations(draw: st.DrawFn) -> Rotation:
    """Draw partitions by rotation, above all of sizes at the edges of blocks and groups."""
    fragments = draw(st.one_of(st.integers(1, 12), st.integers(1, 100)))
    granularity = 2 ** draw(st.integers(0, 10))
    group = fragments * granularity
    edges = [0, 1, granularity, group - 1, group, group + 1, 3 * group + granularity + 1]
    size = draw(st.one_of(st.sampled_from(edges), st.integers(0, min(4 * group, 40_000))))
    seed, epoch = draw(seeds), draw(st.integers(0, 3))
    return Rotation(size, min(fragments, max(size, 1)), granularity, seed, epoch)


@st.composite
def partitions(draw: st.DrawFn) -> Partition:
    """Draw partitions of every kind."""
    kind = draw(st.sampled_from((Rotation, Rotation, Layerwise, Interleaved, Contiguous)))
    if kind is Rotation:
        return draw(rotations())
    size = draw(st.integers(1, 300))
    fragments = draw(st.integers(1, min(size, 9)))
    if kind is Layerwise:
        cut = draw(st.integers(0, size))
        return Layerwise([cut, size - cut], fragments, draw(seeds))
    return Interleaved(size, fragments) if kind is Interleaved else Contiguous(size, fragments)


@st.composite
def inboxes(draw: st.DrawFn) -> tuple[Partition, int, list[int]]:
    """Draw a partition, a seed of values, and the fragments that were received."""
    partition = draw(partitions())
    held = st.integers(0, partition.fragments - 1)
    most = max(1, min(40, 200_000 // max(partition.size, 1)))
    return partition, draw(seeds), draw(st.lists(held, max_size=most))


def _pieces(partition: Partition, seed: int, fragments: list[int]) -> list[Piece]:
    return [
        Piece(fragment, draw(seed + number, 1, partition.length(fragment))[0])
        for number, fragment in enumerate(fragments)
    ]


def _guarded(size: int) -> tuple[Vector, Vector]:
    """Make a vector to write to, and the larger one that it is the middle of."""
    whole = np.full(size + 64, _CANARY, np.float32)
    return whole[32 : 32 + size], whole


def _unharmed(whole: Vector) -> bool:
    return bool((whole[:32] == np.float32(_CANARY)).all() and (whole[-32:] == whole[0]).all())


class BackendManners:
    """What a backend must be besides right; the reference is checked by this alone."""

    @pytest.fixture(autouse=True)
    def _quietly(self) -> Iterator[None]:
        with np.errstate(all="ignore"):
            yield

    def test_says_what_it_is(self, ops: Ops) -> None:
        """It has a name, and a line for ``doctor``."""
        assert ops.name
        assert "\n" not in ops.describe()

    @given(partition=partitions(), seed=seeds)
    @some
    def test_packs_and_assembles(self, ops: Ops, partition: Partition, seed: int) -> None:
        """Fragments are copies, bit for bit, and make the vector again."""
        (x,) = draw(seed, 1, partition.size)
        payloads = ops.pack_all(x, partition)
        assert len(payloads) == partition.fragments
        for fragment, payload in enumerate(payloads):
            assert_same_bits(payload, x[partition.indices(fragment)])
            assert not np.shares_memory(payload, x)
        for fragment in {0, seed % partition.fragments, partition.fragments - 1}:
            assert_same_bits(ops.pack(x, partition, fragment), payloads[fragment])
        assert_same_bits(ops.assemble(partition, payloads), x)

    def test_golden_fragments(self, ops: Ops) -> None:
        """The partition is the one that every node has."""
        partition = Rotation(20, fragments=7, granularity=1, seed=7, epoch=3)
        x = np.arange(20, dtype=np.float32)
        assert ops.pack(x, partition, 2).tolist() == [4, 8, 15]
        pieces = [Piece(2, np.array([1, 2, 3], np.float32)), Piece(2, np.ones(3, np.float32))]
        moved = ops.average(x, partition, pieces)[[4, 8, 15]]
        third = np.float32(1) / np.float32(3)
        assert moved.tolist() == [6 * third, 11 * third, 19 * third]

    @given(seed=seeds, size=sizes, at=st.integers(0, 10_000))
    @some
    def test_finds_what_is_not_finite(self, ops: Ops, seed: int, size: int, at: int) -> None:
        """One value is enough, wherever it is."""
        (x,) = draw(seed, 1, size, odd=False)
        x[1::7] = np.finfo(np.float32).max
        assert ops.finite(x) is True
        if size:
            for bad in (np.inf, -np.inf, np.nan):
                x[at % size] = bad
                assert ops.finite(x) is False

    def test_finds_what_is_not_finite_in_a_long_vector(self, ops: Ops) -> None:
        """Also where a sum of all values would overflow."""
        x = np.full(2**17 + 3, np.finfo(np.float32).max, np.float32)
        assert ops.finite(x) is True
        x[::2] = 1.0
        for place in (0, 2**16, len(x) - 1):
            for bad in (np.inf, -np.inf, np.nan):
                kept, x[place] = x[place].copy(), bad
                assert ops.finite(x) is False
                x[place] = kept
        assert ops.finite(x) is True

    def test_leaves_results_alone(self, ops: Ops) -> None:
        """A result belongs to the caller, however many others are made."""
        size = 2**18 + 5
        x, y = draw(1, 2, size, odd=False)
        held = [ops.combine([x, y], [1.0, float(k)]) for k in range(4)]
        copies = [each.copy() for each in held]
        for _ in range(4):
            ops.mix(x, y, 0.25)
        part = held.pop()[10:20]
        ops.pairwise(x, x, y, 0.5)
        assert_same_bits(part, copies.pop()[10:20])
        for each, copy in zip(held, copies, strict=True):
            assert_same_bits(each, copy)
            assert each.flags.writeable

    @pytest.mark.parametrize(
        "bad", ["dtype", "precision", "list", "strided", "matrix", "short", "one", "torch"]
    )
    def test_refuses_what_is_no_vector(self, ops: Any, bad: str) -> None:
        """In any place, before anything is written."""
        partition = Rotation(100, fragments=4, granularity=4)
        good = [np.ones(100, np.float32) for _ in range(4)]
        wrong: Any = {
            "dtype": np.ones(100, np.int32),
            "precision": np.ones(100),
            "list": [1.0] * 100,
            "strided": np.ones(200, np.float32)[::2],
            "matrix": np.ones((10, 10), np.float32),
            "short": np.ones(99, np.float32),
            "one": np.ones(1, np.float32),
        }.get(bad)
        if bad == "torch":
            wrong = _fake_tensor()
        error = TypeError if bad in ("dtype", "precision", "list", "torch") else ValueError
        for place in range(4):
            vectors: Any = [*good]
            vectors[place] = wrong
            out, whole = _guarded(100)
            calls: list[Callable[[], Any]] = [
                partial(ops.combine, vectors, [1.0] * 4, out=out),
                partial(ops.sums_without, vectors, [0, 2]),
                partial(ops.mix_pairwise, *vectors, share=0.1, weights=(0.5, 0.5)),
                partial(ops.mix_update, *vectors, share=0.1),
            ]
            if place < 3:
                calls += [
                    partial(ops.update, *vectors[:3]),
                    partial(ops.pairwise, *vectors[:3], 0.5),
                ]
            if place < 2:
                calls.append(partial(ops.mix, *vectors[:2], 0.5))
            for call in calls:
                with pytest.raises(error):
                    call()
            assert (whole == np.float32(_CANARY)).all()
        payloads = ops.pack_all(good[0], partition)
        held: Any = [*payloads[:3], wrong]
        calls = [
            partial(ops.average, good[0], partition, [Piece(0, wrong)], out=good[0]),
            partial(ops.average, good[0], partition, [Piece(1, payloads[1])], out=wrong),
            partial(ops.assemble, partition, held),
        ]
        if bad != "precision":  # the reference computes in any, of which there must be one
            calls += [
                partial(ops.pack, wrong, partition, 0),
                partial(ops.pack_all, wrong, partition),
                partial(ops.average, wrong, partition, []),
            ]
        if bad not in ("short", "one", "precision"):
            calls += [partial(ops.finite, wrong), partial(ops.encode, wrong, "int8")]
        for call in calls:
            with pytest.raises(error):
                call()
        assert (good[0] == 1).all()

    def test_refuses_to_write_where_it_must_not(self, ops: Any) -> None:
        """Into read-only memory, or over what it reads."""
        partition = Rotation(100, fragments=4, granularity=4)
        memory = np.arange(300, dtype=np.float32)
        kept = memory.copy()
        x, y, frozen = memory[:100], memory[100:200], memory[200:]
        frozen.flags.writeable = False
        piece = Piece(0, memory[150 : 150 + partition.length(0)])
        for call in (
            partial(ops.combine, [x, y], [1.0, 2.0], out=frozen),
            partial(ops.combine, [x, y], [1.0, 2.0], out=y),
            partial(ops.combine, [x, y], [1.0, 2.0], out=memory[1:101]),
            partial(ops.combine, [x, y], [1.0, 2.0], out=memory[199:299]),
            partial(ops.average, x, partition, [piece], out=frozen),
            partial(ops.average, x, partition, [piece], out=y),
            partial(ops.average, x, partition, [piece], out=memory[1:101]),
        ):
            with pytest.raises(ValueError):
                call()
        assert_same_bits(memory, kept)

    def test_refuses_fragments_that_are_not_there(self, ops: Any) -> None:
        """Numbers out of range, and payloads of other lengths."""
        partition = Rotation(100, fragments=4, granularity=8, seed=3)
        x = np.ones(100, np.float32)
        for fragment in (-1, 4, 2**32):
            with pytest.raises(ValueError, match="not in 0"):
                ops.pack(x, partition, fragment)
            with pytest.raises(ValueError, match="not in 0"):
                ops.average(x, partition, [Piece(fragment, x[:25])], out=x)
        with pytest.raises(ValueError, match="a peer sent 3"):
            ops.average(x, partition, [Piece(1, x[:3].copy())], out=x)
        for left_out in ([0, 0], [1, 0], [2], [-1]):
            with pytest.raises(ValueError):
                ops.sums_without([x, x.copy()], left_out)
        with pytest.raises(ValueError):
            ops.sums_without([x], [0])
        for left_out in ([], [0]):
            with pytest.raises(ValueError):
                ops.sums_without([], left_out)
        assert (x == 1).all()

    def test_refuses_what_is_no_partition(self, ops: Any) -> None:
        """It says so, instead of what it lacks."""
        x = np.ones(4, np.float32)
        wrong: Any
        for wrong in (4, None, [0, 1]):
            for call in (
                partial(ops.pack, x, wrong, 0),
                partial(ops.pack_all, x, wrong),
                partial(ops.assemble, wrong, [x]),
                partial(ops.average, x, wrong, []),
            ):
                with pytest.raises(TypeError, match="Partition"):
                    call()

    def test_refuses_bytes_that_make_no_vector(self, ops: Any) -> None:
        """Of another number, kind or form."""
        x = np.ones(300, np.float32)
        wrong: Any = "bf16"
        for call in (
            partial(ops.encode, x, wrong),
            partial(ops.decode, np.zeros(600, np.uint8), wrong, 300),
        ):
            with pytest.raises(ConfigurationError, match="known: bfloat16"):
                call()
        for wire in WIRES:
            data = ops.encode(x, wire)
            for bad in (data[:-1], np.append(data, data[:1]), np.repeat(data, 2)[::2]):
                with pytest.raises(ValueError):
                    ops.decode(bad, wire, 300)
            with pytest.raises(TypeError):
                ops.decode(data.view(np.int8), wire, 300)


class BackendConformance(BackendManners):
    """The checks. See the head of :mod:`flwr_decentral.testing.backends`."""

    @given(seed=seeds, size=sizes)
    @some
    def test_updates(self, ops: Ops, seed: int, size: int) -> None:
        """Where x has not moved it is assigned, elsewhere added to."""
        x, before, after = draw(seed, 3, size)
        before[::3] = x[::3]
        assert_same(ops.update(x, before, after), REFERENCE.update(x, before, after))
        assert ops.update(x, x, after) is after

    @given(seed=seeds, size=sizes, factors=st.lists(weights, min_size=1, max_size=11))
    @some
    def test_combines(self, ops: Ops, seed: int, size: int, factors: list[float]) -> None:
        """Products are added from the first to the last, and go where they are told."""
        vectors = draw(seed, len(factors), size)
        expected = REFERENCE.combine(vectors, factors)
        kept = [vector.copy() for vector in vectors]
        assert_same(ops.combine(vectors, factors), expected)
        out, whole = _guarded(size)
        assert ops.combine(vectors, factors, out=out) is out
        assert_same(out, expected)
        assert _unharmed(whole)
        for vector, copy in zip(vectors, kept, strict=True):
            assert_same_bits(vector, copy)
        assert_same(ops.combine(vectors, factors, out=vectors[0]), expected)

    @given(data=st.data(), seed=seeds, size=sizes, count=st.integers(2, 9))
    @some
    def test_sums_up_all_but_one(
        self, ops: Ops, data: st.DataObject, seed: int, size: int, count: int
    ) -> None:
        """Each sum is taken from the first to the last."""
        vectors = draw(seed, count, size)
        left_out = sorted(data.draw(st.sets(st.integers(0, count - 1))))
        sums = ops.sums_without(vectors, left_out)
        expected = REFERENCE.sums_without(vectors, left_out)
        for each, other in zip(sums, expected, strict=True):
            assert_same(each, other)
        assert len({id(each) for each in (*sums, *vectors)}) == len(sums) + count

    @given(seed=seeds, size=sizes, weight=weights)
    @some
    def test_moves_toward_a_peer(self, ops: Ops, seed: int, size: int, weight: float) -> None:
        """The difference, the product and the sum are rounded each."""
        x, y, z = draw(seed, 3, size)
        assert_same(ops.pairwise(x, y, z, weight), REFERENCE.pairwise(x, y, z, weight))

    @given(seed=seeds, size=sizes, share=weights)
    @some
    def test_mixes(self, ops: Ops, seed: int, size: int, share: float) -> None:
        """Both vectors move by the same step."""
        x, y = draw(seed, 2, size)
        for each, other in zip(ops.mix(x, y, share), REFERENCE.mix(x, y, share), strict=True):
            assert_same(each, other)

    @given(seed=seeds, size=sizes, share=st.none() | weights, near=weights, far=weights)
    @some
    def test_mixes_and_moves(
        self, ops: Ops, seed: int, size: int, share: float | None, near: float, far: float
    ) -> None:
        """In one go it is what it is in three."""
        vectors = draw(seed, 4, size)
        result = ops.mix_pairwise(*vectors, share=share, weights=(near, far))
        expected = REFERENCE.mix_pairwise(*vectors, share=share, weights=(near, far))
        for each, other in zip(result, expected, strict=True):
            assert_same(each, other)

    @given(seed=seeds, size=sizes, share=st.none() | weights)
    @some
    def test_mixes_and_updates(self, ops: Ops, seed: int, size: int, share: float | None) -> None:
        """In one go it is what it is in three."""
        x, y, before, after = draw(seed, 4, size)
        y[::2], before[::4] = x[::2], x[::4]
        result = ops.mix_update(x, y, before, after, share=share)
        expected = REFERENCE.mix_update(x, y, before, after, share=share)
        for each, other in zip(result, expected, strict=True):
            assert_same(each, other)

    @given(inbox=inboxes())
    @some
    def test_averages(self, ops: Ops, inbox: tuple[Partition, int, list[int]]) -> None:
        """Each coordinate by its own count, in the order of the pieces, wherever it goes."""
        partition, seed, fragments = inbox
        (x,), pieces = draw(seed, 1, partition.size), _pieces(*inbox)
        kept = x.copy()
        expected = REFERENCE.average(x, partition, pieces)
        result = ops.average(x, partition, pieces)
        assert_same(result, expected)
        untouched = [k for k in range(partition.fragments) if k not in fragments]
        for fragment in untouched:
            indices = partition.indices(fragment)
            assert_same_bits(result[indices], x[indices])
        out, whole = _guarded(partition.size)
        assert ops.average(x, partition, pieces, out=out) is out
        assert_same_bits(out, result)
        assert _unharmed(whole)
        assert_same_bits(x, kept)
        assert ops.average(x, partition, pieces, out=x) is x
        assert_same_bits(x, result)

    @pytest.mark.parametrize("wire", WIRES)
    @given(seed=seeds, size=st.one_of(sizes, st.sampled_from([255, 256, 257, 5000])))
    @some
    def test_writes_and_reads(self, ops: Ops, wire: Wire, seed: int, size: int) -> None:
        """Forms on the wire, of values and of any bytes, at any address."""
        (x,) = draw(seed, 1, size)
        tame = draw(seed, 1, size, odd=False)[0] * np.float32(1e-30 if seed % 2 else 1)
        for vector in (x, tame):
            data = ops.encode(vector, wire)
            assert_same_bits(data, REFERENCE.encode(vector, wire))
            assert_same(ops.decode(data, wire, size), REFERENCE.decode(data, wire, size))
            assert_same(ops.rounded(vector, wire), REFERENCE.rounded(vector, wire))
        total = wire_bytes(size, wire)
        rng = np.random.Generator(np.random.PCG64(seed))
        noise = rng.integers(0, 256, total + 3, np.uint8)[3:]
        assert_same(ops.decode(noise, wire, size), REFERENCE.decode(noise, wire, size))


def _fake_tensor() -> Any:
    """Make what looks like a tensor of torch, to see how it is told from a vector."""
    kind = type("Tensor", (), {"__module__": "torch", "requires_grad": True})
    return kind()
