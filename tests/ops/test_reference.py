"""What every backend must do, bit for bit.

The tests run on the reference and on each backend that is installed. Their oracles are loops over
single coordinates, in float32 and in the order that the contract fixes.
"""

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from flwr_decentral.core import ConfigurationError, Contiguous, Interleaved, Layerwise, Rotation
from flwr_decentral.ops import Piece, available, choose

some = settings(
    max_examples=50, deadline=None, suppress_health_check=[HealthCheck.differing_executors]
)


@pytest.fixture(scope="module", params=sorted(available()))
def ops(request):
    try:
        return choose(request.param)
    except ConfigurationError as error:
        pytest.skip(str(error))


def vector(*values):
    return np.array(values, np.float32)


def normal(rng, size):
    return rng.normal(size=size).astype(np.float32)


def bits(array):
    return array.view(np.uint32).tolist()


@st.composite
def partitions(draw):
    fragments = draw(st.integers(1, 12))
    granularity = 2 ** draw(st.integers(0, 6))
    group = fragments * granularity
    edges = [1, granularity, group - 1, group, group + 1, 2 * group + granularity + 1]
    size = max(1, draw(st.one_of(st.sampled_from(edges), st.integers(1, 600))))
    fragments, seed = min(fragments, size), draw(st.integers(0, 2**32))
    kind = draw(st.sampled_from((Rotation, Layerwise, Interleaved, Contiguous)))
    if kind is Rotation:
        return Rotation(size, fragments, granularity, seed)
    if kind in (Interleaved, Contiguous):
        return kind(size, fragments)
    cut = draw(st.integers(0, size))
    return Layerwise([cut, size - cut], fragments, seed)


@st.composite
def inboxes(draw):
    """Draw a partition, a model and pieces of other models, several of some fragments."""
    partition = draw(partitions())
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    scale = np.float32(10.0 ** draw(st.integers(-40, 36)))
    chosen = draw(st.lists(st.integers(0, partition.fragments - 1), max_size=20))
    pieces = [Piece(k, normal(rng, partition.length(k)) * scale) for k in chosen]
    return partition, normal(rng, partition.size) * scale, pieces


def average_by_hand(x, partition, pieces, dtype):
    """Average coordinate by coordinate, in the order of the pieces, in one precision."""
    totals, counts = [dtype(value) for value in x], [0] * partition.size
    for fragment, payload in pieces:
        for p, value in zip(partition.indices(fragment), payload, strict=True):
            totals[p], counts[p] = totals[p] + dtype(value), counts[p] + 1
    averages = [
        total * (dtype(1) / dtype(1 + count)) if count else total
        for total, count in zip(totals, counts, strict=True)
    ]
    return np.array(averages, dtype)


class TestUpdate:
    def test_a_model_that_has_not_moved_becomes_the_trained_one(self, ops):
        x, after = vector(0.1, 1e8), vector(0.3, 1.0)
        updated = ops.update(x, x, after)
        assert bits(updated) == bits(after)
        assert bits(x + (after - x)) != bits(after)

    def test_a_model_that_has_moved_gets_the_difference(self, ops):
        rng = np.random.default_rng(3)
        x, before, after = (normal(rng, 1000) for _ in range(3))
        kept = [array.copy() for array in (x, before, after)]
        updated = ops.update(x, before, after)
        expected = [x[p] + (after[p] - before[p]) for p in range(1000)]
        assert bits(updated) == bits(np.array(expected))
        for array, copy in zip((x, before, after), kept, strict=True):
            assert bits(array) == bits(copy)

    def test_each_coordinate_is_decided_by_its_value(self, ops):
        before, after = vector(1e8, 1e8), vector(1.0, 1.0)
        moved = vector(1e8, 2e8)
        assert ops.update(before.copy(), before, after).tolist() == [1.0, 1.0]
        assert ops.update(moved, before, after).tolist() == [1.0, 1e8]

    @pytest.mark.parametrize("lengths", [(3, 4, 4), (4, 3, 4), (4, 4, 3), (4, 1, 4), (4, 4, 1)])
    def test_wrong_lengths_are_refused(self, ops, lengths):
        with pytest.raises(ValueError):
            ops.update(*(np.ones(length, np.float32) for length in lengths))


class TestCombine:
    @given(st.integers(1, 6), st.integers(0, 40), st.integers(0, 2**32))
    @some
    def test_products_are_rounded_and_added_from_the_first_to_the_last(
        self, ops, count, size, seed
    ):
        rng = np.random.default_rng(seed)
        vectors = [normal(rng, size) for _ in range(count)]
        weights = rng.normal(size=count).tolist()
        expected = []
        for p in range(size):
            total = vectors[0][p] * np.float32(weights[0])
            for v, weight in zip(vectors[1:], weights[1:], strict=True):
                total = total + v[p] * np.float32(weight)
            expected.append(total)
        kept = [v.copy() for v in vectors]
        result = ops.combine(vectors, weights)
        assert result.dtype == np.float32
        assert bits(result) == bits(np.array(expected, np.float32))
        assert [bits(v) for v in vectors] == [bits(copy) for copy in kept]

    def test_the_order_is_told_apart(self, ops):
        terms = [vector(1e8), vector(-1e8), vector(1.0)]
        assert ops.combine(terms, [1, 1, 1]).tolist() == [1.0]
        assert ops.combine(terms[::-1], [1, 1, 1]).tolist() == [0.0]

    def test_a_fused_multiply_add_is_told_apart(self, ops):
        a = np.float32(1 + 2**-12)
        assert ops.combine([vector(-1), vector(a)], [1.0, float(a)]).tolist() == [2.0**-11]

    def test_a_weight_is_rounded_before_it_is_used(self, ops):
        assert ops.combine([vector(3.0)], [1 / 3]) == np.float32(3) * np.float32(1 / 3)

    def test_the_first_vector_may_be_written_to(self, ops):
        x, y = vector(1, 2), vector(3, 4)
        assert ops.combine([x, y], [0.5, 0.5], out=x) is x
        assert x.tolist() == [2, 3]
        assert y.tolist() == [3, 4]

    def test_a_result_is_new_even_for_one_vector(self, ops):
        x = vector(1, 2)
        assert not np.shares_memory(ops.combine([x], [1.0]), x)

    def test_what_does_not_go_together_is_refused_before_anything_is_written(self, ops):
        out = vector(7, 7)
        x, short, one = vector(1, 2), np.ones(3, np.float32), vector(5)
        for vectors, weights in [
            ([], []),
            ([x, x], [1.0]),
            ([x], [1.0, 1.0]),
            ([x, short], [1.0, 1.0]),
            ([x, one], [1.0, 1.0]),
            ([one, x], [1.0, 1.0]),
            ([one], [1.0]),
        ]:
            with pytest.raises(ValueError):
                ops.combine(vectors, weights, out=out)
            assert out.tolist() == [7, 7]


class TestPack:
    @given(partitions(), st.integers(0, 2**32))
    @some
    def test_a_fragment_is_a_copy_of_its_coordinates_in_order(self, ops, partition, seed):
        x = normal(np.random.default_rng(seed), partition.size)
        kept = x.copy()
        packed = [ops.pack(x, partition, k) for k in range(partition.fragments)]
        for k, payload in enumerate(packed):
            assert payload.dtype == np.float32
            assert payload.flags.c_contiguous
            assert bits(payload) == bits(x[partition.indices(k)])
            assert not np.shares_memory(payload, x)
        together = ops.pack_all(x, partition)
        assert [bits(payload) for payload in together] == [bits(payload) for payload in packed]
        assert bits(x) == bits(kept)

    @given(partition=partitions(), seed=st.integers(0, 100))
    @some
    def test_fragments_are_put_together_again(self, ops, partition, seed):
        x = normal(np.random.default_rng(seed), partition.size)
        payloads = ops.pack_all(x, partition)
        again = ops.assemble(partition, payloads)
        assert again.dtype == np.float32
        assert bits(again) == bits(x)
        assert all(not np.shares_memory(again, payload) for payload in payloads)

    @pytest.mark.parametrize(
        "partition", [Rotation(100, 4, 8), Interleaved(100, 4), Contiguous(100, 4)]
    )
    def test_only_all_fragments_make_a_vector(self, ops, partition):
        payloads = ops.pack_all(np.ones(100, np.float32), partition)
        short = [*payloads[:3], payloads[3][:-1]]
        for bad in (payloads[:3], [*payloads, payloads[0]], short, []):
            with pytest.raises(ValueError):
                ops.assemble(partition, bad)

    def test_every_bit_is_copied(self, ops):
        patterns = np.array([0x7F800001, 0xFFC12345, 0x80000000, 1, 0x7F7FFFFF], np.uint32)
        x = patterns.view(np.float32)
        partition = Rotation(5, fragments=2, granularity=1)
        for k, payload in enumerate(ops.pack_all(x, partition)):
            assert bits(payload) == patterns[partition.indices(k)].tolist()

    @pytest.mark.parametrize(
        "partition",
        [Rotation(100, 4, 8), Layerwise([60, 40], 4), Interleaved(100, 4), Contiguous(100, 4)],
    )
    def test_what_does_not_fit_is_refused(self, ops, partition):
        for size in (99, 101, 104, 1):
            with pytest.raises(ValueError):
                ops.pack(np.ones(size, np.float32), partition, 0)
            with pytest.raises(ValueError):
                ops.pack_all(np.ones(size, np.float32), partition)
        for fragment in (-1, 4):
            with pytest.raises(ValueError):
                ops.pack(np.ones(100, np.float32), partition, fragment)
        with pytest.raises(ValueError):
            ops.pack(np.ones(200, np.float32)[::2], partition, 0)


class TestAverage:
    def test_golden_aggregation(self, ops):
        # From A the coordinates 0 and 1, from B the coordinates 1 and 2, each a fragment of one.
        partition = Rotation(4, fragments=4, granularity=1)
        owner = partition.fragment_of(np.arange(4)).tolist()
        received = [(0, 2), (1, 4), (1, 1), (2, 3)]
        pieces = [Piece(owner[p], vector(value)) for p, value in received]
        result = ops.average(vector(0, 0, 0, 0), partition, pieces)
        assert result.tolist() == [1, float(np.float32(5) * np.float32(1 / 3)), 1.5, 0]

    @given(inboxes())
    @some
    def test_v4_bit_for_bit_the_loop_over_single_coordinates(self, ops, inbox):
        partition, x, pieces = inbox
        kept, payloads = x.copy(), [payload.copy() for _, payload in pieces]
        result = ops.average(x, partition, pieces)
        assert bits(result) == bits(average_by_hand(x, partition, pieces, np.float32))
        assert result is not x
        assert bits(x) == bits(kept)
        assert [bits(p.payload) for p in pieces] == [bits(payload) for payload in payloads]

    @given(inboxes())
    @some
    def test_v4_close_to_the_loop_in_float64(self, ops, inbox):
        partition, x, pieces = inbox
        exact = average_by_hand(x, partition, pieces, np.float64)
        largest = max(
            [float(np.abs(array).max(initial=0)) for array in (x, *(p[1] for p in pieces))]
        )
        bound = (len(pieces) + 2) * (largest * 2.0**-23 + 2.0**-149)
        assert np.abs(ops.average(x, partition, pieces) - exact).max() <= bound

    @given(inboxes())
    @some
    def test_v5_coordinates_that_nobody_sent_keep_their_bits(self, ops, inbox):
        partition, x, pieces = inbox
        sent = {fragment for fragment, _ in pieces}
        kept = [partition.indices(k) for k in range(partition.fragments) if k not in sent]
        for indices in kept:
            # A signaling NaN, which any arithmetic would change.
            x.view(np.uint32)[indices[::2]] = 0x7F800001
        result = ops.average(x, partition, pieces)
        for indices in kept:
            assert bits(result[indices]) == bits(x[indices])

    @given(inboxes())
    @some
    def test_v6_the_average_lies_between_its_terms(self, ops, inbox):
        partition, x, pieces = inbox
        low, high = x.astype(np.float64), x.astype(np.float64)
        for fragment, payload in pieces:
            indices = partition.indices(fragment)
            low[indices] = np.minimum(low[indices], payload)
            high[indices] = np.maximum(high[indices], payload)
        slack = (len(pieces) + 2) * (np.maximum(-low, high) * 2.0**-23 + 2.0**-149)
        result = ops.average(x, partition, pieces)
        assert (result >= low - slack).all()
        assert (result <= high + slack).all()

    @given(partitions(), st.integers(0, 2**32), st.integers(1, 6))
    @some
    def test_v9_equal_models_stay_as_they_are(self, ops, partition, seed, copies):
        x = normal(np.random.default_rng(seed), partition.size)
        pieces = [
            Piece(k, payload)
            for _ in range(copies)
            for k, payload in enumerate(ops.pack_all(x, partition))
        ]
        result = ops.average(x, partition, pieces)
        ulps = np.abs(result.view(np.int32).astype(np.int64) - x.view(np.int32))
        assert ulps.max() <= copies + 1
        if copies == 1:
            assert bits(result) == bits(x)

    def test_v3_one_fragment_is_the_plain_average_of_the_models(self, ops):
        rng = np.random.default_rng(1)
        x, a, b = (normal(rng, 333) for _ in range(3))
        result = ops.average(x, Rotation(333, 1, 64), [Piece(0, a), Piece(0, b)])
        assert bits(result) == bits(((x + a) + b) * np.float32(1 / 3))

    def test_the_order_of_the_pieces_is_the_order_of_the_sum(self, ops):
        partition = Rotation(1, fragments=1, granularity=1)
        x, pieces = vector(1.0), [Piece(0, vector(1e8)), Piece(0, vector(-1e8))]
        assert ops.average(x, partition, pieces).tolist() == [0.0]
        assert ops.average(vector(0), partition, [*pieces, Piece(0, x)]).tolist() == [0.25]

    def test_pieces_of_different_fragments_do_not_disturb_each_other(self, ops):
        rng = np.random.default_rng(2)
        partition = Rotation(500, fragments=7, granularity=4, seed=9)
        x = normal(rng, 500)
        pieces = [Piece(k, normal(rng, partition.length(k))) for k in (3, 0, 3, 6, 0, 3)]
        regrouped = sorted(pieces, key=lambda piece: piece.fragment)
        assert bits(ops.average(x, partition, pieces)) == bits(ops.average(x, partition, regrouped))

    def test_an_empty_inbox_changes_nothing(self, ops):
        x = vector(1, -0.0, np.nan)
        result = ops.average(x, Rotation(3, 1, 1), [])
        assert bits(result) == bits(x)
        assert not np.shares_memory(result, x)

    @pytest.mark.parametrize("partition", [Rotation(100, 4, 8, 3), Layerwise([60, 40], 4)])
    def test_the_result_goes_where_it_is_told(self, ops, partition):
        rng = np.random.default_rng(4)
        x, pieces = normal(rng, 100), [Piece(2, normal(rng, partition.length(2)))]
        expected, kept = bits(ops.average(x, partition, pieces)), bits(x)
        out = np.full(100, 9, np.float32)
        assert ops.average(x, partition, pieces, out=out) is out
        assert bits(out) == expected
        assert bits(x) == kept
        assert ops.average(x, partition, pieces, out=x) is x
        assert bits(x) == expected

    @pytest.mark.parametrize("partition", [Rotation(100, 4, 8, 3), Layerwise([60, 40], 4)])
    def test_what_does_not_fit_is_refused_before_anything_is_written(self, ops, partition):
        x, good = (
            np.arange(100, dtype=np.float32),
            Piece(0, np.ones(partition.length(0), np.float32)),
        )
        out = np.full(100, 9, np.float32)
        for bad in [
            Piece(1, np.ones(partition.length(1) + 1, np.float32)),
            Piece(1, np.ones(partition.length(1) - 1, np.float32)),
            Piece(1, np.ones(1, np.float32)),
            Piece(1, np.ones(0, np.float32)),
            Piece(4, np.ones(25, np.float32)),
            Piece(-1, np.ones(25, np.float32)),
        ]:
            for target in (x, out):
                with pytest.raises(ValueError):
                    ops.average(x, partition, [good, bad], out=target)
        assert x.tolist() == list(range(100))
        assert out.tolist() == [9] * 100

    def test_models_that_are_not_the_partitions_are_refused(self, ops):
        partition, out = Rotation(100, 4, 8), np.full(99, 9, np.float32)
        for size in (1, 99, 101):
            with pytest.raises(ValueError):
                ops.average(np.ones(size, np.float32), partition, [])
        with pytest.raises(ValueError):
            ops.average(np.ones(100, np.float32), partition, [], out=out)
        with pytest.raises(ValueError):
            ops.average(np.ones(100, np.float32), partition, [], out=np.ones(200, np.float32)[::2])
        assert out.tolist() == [9] * 99


class TestFinite:
    @pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
    @pytest.mark.parametrize("at", [0, 77, 999])
    def test_one_bad_value_is_found_wherever_it_is(self, ops, bad, at):
        x = np.ones(1000, np.float32)
        assert ops.finite(x) is True
        x[at] = bad
        assert ops.finite(x) is False

    def test_opposite_infinities_do_not_cancel(self, ops):
        assert ops.finite(vector(np.inf, -np.inf)) is False

    def test_a_sum_that_overflows_is_not_taken_for_a_bad_value(self, ops):
        huge = np.finfo(np.float32).max
        assert ops.finite(np.full(100, huge, np.float32)) is True
        assert ops.finite(vector(huge, huge, -huge, -huge)) is True
        x = np.full(100, huge, np.float32)
        x[50] = np.nan
        assert ops.finite(x) is False

    def test_small_and_empty_vectors(self, ops):
        assert ops.finite(np.empty(0, np.float32)) is True
        assert ops.finite(vector(-0.0, 1e-45)) is True
