import hashlib
import struct

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flwr_decentral.core import (
    ConfigurationError,
    Contiguous,
    Interleaved,
    Layerwise,
    Rotation,
    default_granularity,
)

MASK = 2**32 - 1


def rotation_by_hand(seed, epoch, fragments, granularity, group):
    """The keyed hash in plain integers."""
    fields = struct.pack("<QQII", seed, epoch, fragments, granularity)
    key = int.from_bytes(
        hashlib.blake2b(fields, digest_size=8, person=b"fragkern1").digest(), "little"
    )
    k0, k1 = key & MASK, key >> 32
    h = (group + k0) & MASK
    h ^= h >> 17
    h = h * 0xED5AD4BB & MASK
    h ^= h >> 11
    h ^= k1
    h = h * 0xAC4C1B51 & MASK
    h ^= h >> 15
    h = h * 0x31848BAB & MASK
    h ^= h >> 14
    return h * fragments >> 32


def owner_by_hand(partition, index):
    block = index // partition.granularity
    group, position = divmod(block, partition.fragments)
    rotation = rotation_by_hand(
        partition.seed, partition.epoch, partition.fragments, partition.granularity, group
    )
    return (position - rotation) % partition.fragments


@st.composite
def rotations(draw):
    fragments = draw(st.one_of(st.integers(1, 12), st.integers(13, 100)))
    granularity = 2 ** draw(st.integers(0, 7))
    group = fragments * granularity
    edge = [1, granularity, group - 1, group, group + 1, 3 * group - 1, 3 * group + granularity]
    size = max(1, draw(st.one_of(st.sampled_from(edge), st.integers(1, 3000))))
    fragments = min(fragments, size)
    seed, epoch = draw(st.integers(0, 2**64 - 1)), draw(st.integers(0, 2**64 - 1))
    return Rotation(size, fragments, granularity, seed, epoch)


# Rotation


@pytest.mark.parametrize(
    ("seed", "epoch", "fragments", "granularity", "key", "first"),
    [
        (1, 0, 10, 64, 0xB3BAD9170A87EC54, [9, 5, 4, 6, 1, 6, 3, 3, 3, 6, 3, 7, 8, 9, 0, 4]),
        (7, 3, 7, 1, 0x0BD4CB6675CC47FB, [2, 6, 6, 3, 4, 0, 3, 4, 3, 4, 6, 3, 2, 5, 3, 5]),
    ],
)
def test_golden_keys_and_rotations(seed, epoch, fragments, granularity, key, first):
    partition = Rotation(16 * fragments * granularity, fragments, granularity, seed, epoch)
    assert partition.key == key
    assert partition.rotations.tolist() == first


def test_golden_fragment():
    partition = Rotation(20, fragments=7, granularity=1, seed=7, epoch=3)
    assert partition.indices(2).tolist() == [4, 8, 15]


def test_each_part_of_the_key_counts():
    base = {"size": 4096, "fragments": 8, "granularity": 16, "seed": 1, "epoch": 2}
    changed = [{}, {"fragments": 16}, {"granularity": 32}, {"seed": 2}, {"epoch": 1}]
    assert len({Rotation(**{**base, **change}).key for change in changed}) == len(changed)
    assert Rotation(**{**base, "size": 9999}).key == Rotation(**base).key


@given(rotations())
@settings(max_examples=60, deadline=None)
def test_v1_every_coordinate_has_exactly_one_fragment(partition):
    parts = [partition.indices(k) for k in range(partition.fragments)]
    assert np.sort(np.concatenate(parts)).tolist() == list(range(partition.size))
    for k, part in enumerate(parts):
        assert len(part) == partition.length(k)
        assert (np.diff(part) > 0).all()
        assert (partition.fragment_of(part) == k).all()


@given(rotations())
@settings(max_examples=60, deadline=None)
def test_fragments_differ_by_one_block_at_most(partition):
    lengths = [partition.length(k) for k in range(partition.fragments)]
    assert max(lengths) - min(lengths) <= partition.granularity


@given(rotations(), st.data())
@settings(max_examples=50, deadline=None)
def test_v2_the_owner_is_a_function_of_the_parameters_alone(partition, data):
    indices = data.draw(st.lists(st.integers(0, partition.size - 1), min_size=1, max_size=20))
    owners = [owner_by_hand(partition, index) for index in indices]
    assert partition.fragment_of(np.array(indices)).tolist() == owners
    twin = Rotation(
        partition.size,
        partition.fragments,
        partition.granularity,
        partition.seed,
        partition.epoch,
    )
    assert twin == partition
    assert hash(twin) == hash(partition)
    assert twin.fragment_of(np.array(indices)).tolist() == owners


@given(rotations(), st.data())
@settings(max_examples=50, deadline=None)
def test_the_payload_of_a_whole_group_lies_at_group_times_granularity(partition, data):
    fragment = data.draw(st.integers(0, partition.fragments - 1))
    indices, g = partition.indices(fragment), partition.granularity
    for group in range(partition.size // (partition.fragments * g)):
        rotation = int(partition.rotations[group])
        start = (group * partition.fragments + (fragment + rotation) % partition.fragments) * g
        assert indices[group * g : (group + 1) * g].tolist() == list(range(start, start + g))


@given(rotations(), st.integers(1, 500))
@settings(max_examples=60, deadline=None)
def test_a_longer_vector_keeps_the_whole_groups_of_a_shorter_one(partition, more):
    longer = Rotation(
        partition.size + more,
        partition.fragments,
        partition.granularity,
        partition.seed,
        partition.epoch,
    )
    everything = np.arange(partition.size)
    assert (longer.fragment_of(everything) == partition.fragment_of(everything)).all()


def test_a_last_group_may_leave_fragments_without_a_block():
    partition = Rotation(10, fragments=4, granularity=4, seed=5)
    lengths = sorted(partition.length(k) for k in range(4))
    assert lengths == [0, 2, 4, 4]


def test_one_fragment_is_the_whole_vector():
    assert Rotation(77, fragments=1, granularity=8).indices(0).tolist() == list(range(77))


def test_an_empty_vector_has_one_empty_fragment():
    partition = Rotation(0, fragments=1, granularity=8)
    assert partition.groups == partition.length(0) == len(partition.indices(0)) == 0


# Critical values of chi-square at 0.1 %, by degrees of freedom.
@pytest.mark.parametrize(("fragments", "critical"), [(2, 10.83), (7, 22.46), (10, 27.88)])
@pytest.mark.parametrize(("seed", "epoch"), [(0, 0), (1, 0), (0, 1), (2**63, 7)])
def test_rotations_are_uniform(fragments, critical, seed, epoch):
    drawn = Rotation(40_000 * fragments, fragments, 1, seed, epoch).rotations
    assert chi_square(drawn, fragments) < critical


@pytest.mark.parametrize("stride", [1, 2, 64])
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_rotations_of_two_groups_are_independent(stride, seed):
    drawn = Rotation(50_000 * 8, 8, 1, seed).rotations
    pairs = drawn[:-stride] * 8 + drawn[stride:]
    assert chi_square(pairs, 64) < 103.4  # 63 degrees of freedom, 0.1 %


@pytest.mark.parametrize("change", [{"seed": 1}, {"epoch": 1}, {"seed": 2**32}])
def test_rotations_under_two_keys_are_independent(change):
    base = {"size": 50_000 * 8, "fragments": 8, "granularity": 1, "seed": 0, "epoch": 0}
    pairs = Rotation(**base).rotations * 8 + Rotation(**{**base, **change}).rotations
    assert chi_square(pairs, 64) < 103.4


def chi_square(values, cells):
    counts = np.bincount(values, minlength=cells)
    assert len(counts) == cells
    expected = len(values) / cells
    return float(((counts - expected) ** 2 / expected).sum())


def test_the_chi_square_test_can_fail():
    biased = np.arange(40_000) % 10
    biased[biased == 9] = 8
    assert chi_square(biased, 10) > 27.88


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((100, 0, 8), "fragments must be at least 1, got 0"),
        ((100, -3, 8), "fragments must be at least 1"),
        ((5, 6, 1), "6 fragments cannot be cut from a model of 5 .*set fragments to at most 5"),
        ((100, 10, 0), "power of two, got 0"),
        ((100, 10, 12), "power of two, got 12; try 1"),
        ((100, 10, 8, -1), r"seed must be in \[0, 2\*\*64\), got -1"),
        ((100, 10, 8, 0, 2**64), "epoch must be in"),
    ],
)
def test_a_bad_rotation_is_refused(arguments, message):
    with pytest.raises(ConfigurationError, match=message):
        Rotation(*arguments)


@pytest.mark.parametrize("partition", [Rotation(100, 10, 8), Layerwise([60, 40], 10)])
def test_there_is_no_fragment_beyond_the_last(partition):
    for fragment in (-1, 10):
        with pytest.raises(ValueError, match=rf"fragment {fragment} is not in 0\.\.9"):
            partition.length(fragment)
        with pytest.raises(ValueError, match=rf"fragment {fragment} is not in 0\.\.9"):
            partition.indices(fragment)


@given(st.integers(0, 10**7), st.integers(1, 1000))
@settings(max_examples=80, deadline=None)
def test_default_granularity_is_the_largest_that_leaves_16_groups(size, fragments):
    g = default_granularity(size, fragments)
    assert g in (1, 2, 4, 8, 16, 32, 64)
    assert g == 1 or size // (fragments * g) >= 16
    assert g == 64 or size // (fragments * 2 * g) < 16


# Layerwise


@st.composite
def layerwises(draw):
    tensors = draw(st.lists(st.integers(0, 60), min_size=1, max_size=8).filter(any))
    fragments = draw(st.integers(1, min(20, sum(tensors))))
    return tensors, Layerwise(tensors, fragments, draw(st.integers(0, 2**64 - 1)))


@given(layerwises())
@settings(max_examples=50, deadline=None)
def test_layerwise_fragments_partition_every_tensor_evenly(drawn):
    tensors, partition = drawn
    parts = [partition.indices(k) for k in range(partition.fragments)]
    assert np.sort(np.concatenate(parts)).tolist() == list(range(partition.size))
    assert [len(part) for part in parts] == [
        partition.length(k) for k in range(partition.fragments)
    ]
    start = 0
    for length in tensors:
        shares = [int(((part >= start) & (part < start + length)).sum()) for part in parts]
        assert max(shares) - min(shares) <= 1
        start += length
    lengths = [len(part) for part in parts]
    assert max(lengths) - min(lengths) <= 1
    for k, part in enumerate(parts):
        assert (partition.fragment_of(part) == k).all()


def test_layerwise_spreads_remainders_in_turn():
    # Ten tensors of one scalar each: the released code would give all ten to the last fragment.
    partition = Layerwise([1] * 10, fragments=4)
    assert [partition.length(k) for k in range(4)] == [3, 3, 2, 2]


def test_layerwise_depends_on_its_seed_and_lengths_alone():
    def listing(partition):
        return [partition.indices(k).tolist() for k in range(partition.fragments)]

    tensors = [40, 7, 25]
    assert listing(Layerwise(tensors, 5, seed=1)) == listing(Layerwise(tensors, 5, seed=1))
    assert listing(Layerwise(tensors, 5, seed=1)) != listing(Layerwise(tensors, 5, seed=2))


def test_layerwise_golden_fragments():
    partition = Layerwise([8, 5], fragments=3, seed=1)
    listing = [partition.indices(k).tolist() for k in range(3)]
    assert listing == [[7, 2, 1, 11, 12], [6, 3, 4, 9], [0, 5, 10, 8]]


def test_a_bad_layerwise_partition_is_refused():
    with pytest.raises(ConfigurationError, match="at most 10"):
        Layerwise([6, 4], fragments=11)
    with pytest.raises(ConfigurationError, match="seed must be in"):
        Layerwise([6, 4], fragments=2, seed=-1)


@pytest.mark.parametrize(("size", "fragments"), [(1, 1), (2, 2), (7, 2), (7, 3), (64, 5)])
def test_interleaved_deals_coordinates_out_in_turn(size, fragments):
    partition = Interleaved(size, fragments)
    cut = [partition.indices(k) for k in range(fragments)]
    for k, indices in enumerate(cut):
        assert indices.tolist() == list(range(size))[k::fragments]
        assert partition.length(k) == len(indices)
        assert set(partition.fragment_of(indices).tolist()) == {k}


def test_a_bad_interleaved_partition_is_refused():
    with pytest.raises(ConfigurationError, match="set fragments to at most 1"):
        Interleaved(1, 2)
    with pytest.raises(ValueError, match="fragment 2 is not in 0..1"):
        Interleaved(4, 2).indices(2)


@pytest.mark.parametrize(("size", "fragments"), [(1, 1), (2, 2), (7, 2), (7, 3), (64, 5)])
def test_contiguous_cuts_runs_of_about_equal_length(size, fragments):
    partition = Contiguous(size, fragments)
    cut = [partition.indices(k) for k in range(fragments)]
    assert np.concatenate(cut).tolist() == list(range(size))
    lengths = [len(indices) for indices in cut]
    assert max(lengths) - min(lengths) <= 1
    for k, indices in enumerate(cut):
        assert partition.length(k) == len(indices)
        assert set(partition.fragment_of(indices).tolist()) == {k}


def test_a_bad_contiguous_partition_is_refused():
    with pytest.raises(ConfigurationError, match="set fragments to at most 1"):
        Contiguous(1, 2)
    for fragment in (-1, 2):
        with pytest.raises(ValueError, match="is not in 0..1"):
            Contiguous(4, 2).indices(fragment)
