"""Random operations, each compared bit for bit with the reference.

The same checks are made of the kernels in the emulator, of each mutant of them, and of a real GPU.
They take a backend, a *maker* that turns numpy arrays into what is handed to it and back, and a
generator of random numbers.
"""

from typing import Any, NamedTuple

import numpy as np

from flwr_decentral.core import Contiguous, Interleaved, Layerwise, Rotation
from flwr_decentral.core.wire import WIRES, wire_bytes
from flwr_decentral.ops import Piece, Reference
from flwr_decentral.ops.codecs import decode, encode

REFERENCE = Reference()
SIZES = [0, 1, 3, 4, 5, 31, 64, 255, 256, 257, 1023, 1024, 1025, 1027]


class Host:
    """Hand over numpy arrays."""

    kind = "numpy"

    def make(self, array, rng):
        return array.copy()

    def take(self, array):
        return array

    def check(self):
        pass


class OnDevice:
    """Hand over tensors, one in four at an address that is no multiple of 16, all with guards."""

    kind = "tensor"
    _GUARD = 64

    def __init__(self, device: Any, synchronize):
        import torch

        self.torch, self.device, self.synchronize = torch, device, synchronize
        self.made = []

    def empty(self, length, dtype, shift=0):
        """Make a tensor with a pattern before and after it."""
        dtype = getattr(self.torch, dtype)
        size = length * dtype.itemsize
        # Another one for each, so that no guard can be written over with a copy of itself.
        pattern = 1 + 37 * len(self.made) % 251
        whole = self.torch.full(
            (size + 3 * self._GUARD,), pattern, dtype=self.torch.uint8, device=self.device
        )
        start = self._GUARD + (-whole.data_ptr()) % 16 + shift * dtype.itemsize
        self.made.append((whole, start, start + size, pattern))
        return whole[start : start + size].view(dtype)

    def make(self, array, rng):
        tensor = self.empty(len(array), str(array.dtype), int(rng.random() < 0.25))
        tensor.copy_(self.torch.from_numpy(array.copy()))
        return tensor

    def take(self, tensor):
        self.synchronize()
        return tensor.cpu().numpy()

    def check(self):
        self.synchronize()
        for whole, start, end, pattern in self.made:
            for guard in (whole[:start], whole[end:]):
                assert bool((guard == pattern).all()), "written beyond a tensor"
        self.made.clear()


class Trial(NamedTuple):
    """An operation under way: what was handed over must not change."""

    ops: Any
    maker: Any
    rng: Any
    handed: list

    def hand(self, array):
        made = self.maker.make(array, self.rng)
        self.handed.append((made, array))
        return made

    def untouched(self, but=None):
        for made, array in self.handed:
            if made is not but:
                same(self.maker.take(made), array)

    def equal(self, found, expected, nan=False):
        assert type(found) is type(self.handed[0][0])
        same(self.maker.take(found), expected, nan)


def same(found, expected, nan=False):
    """Compare bits; with nan, two NaNs are equal."""
    assert found.dtype == expected.dtype
    assert found.shape == expected.shape
    a, b = found.view(np.uint8), expected.view(np.uint8)
    if nan:
        both = np.repeat(np.isnan(found) & np.isnan(expected), found.itemsize)
        a, b = a[~both], b[~both]
    np.testing.assert_array_equal(a, b)


def values(rng, size):
    """Draw finite values of all magnitudes, and many zeros of both signs."""
    x = rng.standard_normal(size) * 10.0 ** rng.integers(-3, 4, size)
    luck = rng.random(size)
    x[luck < 0.15] = 0.0
    x[luck < 0.1] = -0.0
    return x.astype(np.float32)


def size_of(rng):
    return int(rng.choice(SIZES) if rng.random() < 0.7 else rng.integers(0, 3000))


def partition_of(rng, native=True):
    fragments = int(rng.choice([1, 2, 3, 7, 10, 100, int(rng.integers(1, 30))]))
    granularity = 1 << int(rng.choice([0, 1, 2, 3, 6, 8, 10]))
    group = fragments * granularity
    edges = [1, granularity, group - 1, group, group + 1, group + granularity + 3, 3 * group]
    size = max(1, int(rng.choice(edges) if rng.random() < 0.6 else rng.integers(1, 3 * group + 9)))
    size, fragments = min(size, 9000), min(fragments, size, 9000)
    kind = rng.choice(["rotation"] * 6 + ["interleaved", "contiguous", "layerwise"])
    if kind == "interleaved":
        return Interleaved(size, fragments)
    if kind == "contiguous":
        return Contiguous(size, fragments)
    if kind == "layerwise" and not native:
        return Layerwise([size // 3, size - size // 3], fragments, 5)
    return Rotation(size, fragments, granularity, int(rng.integers(2**63)), int(rng.integers(9)))


def check_update(t):
    size = size_of(t.rng)
    x, before, after = (values(t.rng, size) for _ in range(3))
    still = t.rng.random(size) < 0.4
    x[still] = before[still]
    result = t.ops.update(t.hand(x), t.hand(before), t.hand(after))
    t.equal(result, REFERENCE.update(x, before, after))


def check_combine(t):
    count = int(t.rng.choice([1, 2, 3, 5, 8, 320, 321, 645]))
    size = size_of(t.rng) if count < 10 else int(t.rng.integers(1, 40))
    vectors = [values(t.rng, size) for _ in range(count)]
    weights = t.rng.standard_normal(count).tolist()
    handed = [t.hand(vector) for vector in vectors]
    expected = REFERENCE.combine(vectors, weights)
    where = t.rng.integers(3)
    out = [None, handed[0], t.maker.make(vectors[0], t.rng)][where]
    result = t.ops.combine(handed, weights, out)
    assert out is None or result is out
    t.equal(result, expected)
    t.untouched(but=out)


def check_pairwise(t):
    size = size_of(t.rng)
    x, mine, theirs = (values(t.rng, size) for _ in range(3))
    weight = float(t.rng.choice([0.5, 1 / 3, 0.9]))
    result = t.ops.pairwise(t.hand(x), t.hand(mine), t.hand(theirs), weight)
    t.equal(result, REFERENCE.pairwise(x, mine, theirs, weight))


def check_mix(t):
    x, y = values(t.rng, size := size_of(t.rng)), values(t.rng, size)
    results = t.ops.mix(t.hand(x), t.hand(y), 0.3)
    for result, expected in zip(results, REFERENCE.mix(x, y, 0.3), strict=True):
        t.equal(result, expected)


def check_mix_pairwise(t):
    size = size_of(t.rng)
    x, y, mine, theirs = (values(t.rng, size) for _ in range(4))
    how = {"share": [None, 0.0, 0.37][t.rng.integers(3)], "weights": (-0.5, 1 / 3)}
    results = t.ops.mix_pairwise(*(t.hand(each) for each in (x, y, mine, theirs)), **how)
    for result, expected in zip(
        results, REFERENCE.mix_pairwise(x, y, mine, theirs, **how), strict=True
    ):
        t.equal(result, expected)


def check_mix_update(t):
    size = size_of(t.rng)
    x, y, before, after = (values(t.rng, size) for _ in range(4))
    for each in (x, y):
        still = t.rng.random(size) < 0.3
        each[still] = before[still]
    share = [None, 0.0, 0.37][t.rng.integers(3)]
    results = t.ops.mix_update(*(t.hand(each) for each in (x, y, before, after)), share=share)
    for result, expected in zip(
        results, REFERENCE.mix_update(x, y, before, after, share=share), strict=True
    ):
        t.equal(result, expected)


def check_sums_without(t):
    count = int(t.rng.choice([2, 3, 4, 9, 12, 384, 385, 800]))
    size = size_of(t.rng) if count < 20 else int(t.rng.integers(1, 40))
    vectors = [values(t.rng, size) for _ in range(count)]
    left_out = sorted({0, count - 1, *t.rng.integers(0, count, 9).tolist()})
    left_out = left_out[int(t.rng.integers(3)) :][: int(t.rng.integers(0, 12))]
    results = t.ops.sums_without([t.hand(vector) for vector in vectors], left_out)
    for result, expected in zip(results, REFERENCE.sums_without(vectors, left_out), strict=True):
        t.equal(result, expected)


def check_pack(t):
    partition = partition_of(t.rng, t.maker.kind == "tensor")
    x = t.rng.integers(0, 2**32, partition.size, dtype=np.uint32).view(np.float32)
    fragment = int(t.rng.integers(partition.fragments))
    result = t.ops.pack(t.hand(x), partition, fragment)
    t.equal(result, REFERENCE.pack(x, partition, fragment))


def check_pack_all_and_assemble(t):
    partition = partition_of(t.rng, t.maker.kind == "tensor")
    if t.rng.random() < 0.1:  # more fragments than a table holds
        partition = Rotation(3000, 1100, 1, 3)
    x = t.rng.integers(0, 2**32, partition.size, dtype=np.uint32).view(np.float32)
    payloads = t.ops.pack_all(t.hand(x), partition)
    expected = REFERENCE.pack_all(x, partition)
    assert len(payloads) == len(expected)
    for payload, each in zip(payloads, expected, strict=True):
        t.equal(payload, each)
    t.equal(t.ops.assemble(partition, [t.hand(each) for each in expected]), x)


def check_average(t):
    partition = partition_of(t.rng, t.maker.kind == "tensor")
    count = int(t.rng.choice([0, 1, 2, 6, 60]))
    chosen = t.rng.integers(0, partition.fragments, count)
    luck = t.rng.random()
    if luck < 0.1:  # more pieces than a table holds, most of them of one fragment
        partition = Rotation(70, 5, 4, 8)
        chosen = np.minimum(t.rng.integers(0, 12, 1200), 4)
    elif luck < 0.2:  # more fragments than a table holds
        partition = Rotation(1801, 300, 2, 9)
        chosen = np.concatenate([t.rng.integers(0, 300, 40), [0, 127, 128, 299]])
    x = values(t.rng, partition.size)
    pieces = [Piece(int(k), values(t.rng, partition.length(int(k)))) for k in chosen]
    handed = [Piece(k, t.hand(payload)) for k, payload in pieces]
    given = t.hand(x)
    out = [None, given, t.maker.make(x, t.rng)][t.rng.integers(3)]
    result = t.ops.average(given, partition, handed, out)
    assert out is None or result is out
    t.equal(result, REFERENCE.average(x, partition, pieces))
    t.untouched(but=out)


def check_finite(t):
    size = size_of(t.rng)
    x = values(t.rng, size)
    broken = size > 0 and t.rng.random() < 0.6
    if broken:
        x[t.rng.integers(size)] = t.rng.choice([np.inf, -np.inf, np.nan])
    assert t.ops.finite(t.hand(x)) is not broken


def wild(rng, size):
    """Draw bits at random, ties of bfloat16 and float16, and blocks of one magnitude."""
    x = rng.integers(0, 2**32, size, dtype=np.uint32)
    some = rng.random(size)
    x = np.where(some < 0.2, x & np.uint32(0xFFFF0000) | np.uint32(0x8000), x)
    x = np.where((some > 0.2) & (some < 0.4), x & np.uint32(0xFFFFE000) | np.uint32(0x1000), x)
    x = x.view(np.float32)
    near = (rng.standard_normal(size) * 2.0 ** float(rng.integers(-30, 10))).astype(np.float32)
    x = np.where(some > 0.6, near, x)
    for start in range(0, size, 256):
        block = x[start : start + 256]
        which = rng.integers(6)
        if which == 0:  # no magnitude left that has a scale
            block[:] = rng.standard_normal(len(block)) * 2.0**-101
        elif which <= 4:
            block[~np.isfinite(block)] = 1
            block[:] = rng.standard_normal(len(block)) * 2.0 ** float(rng.integers(-105, 100))
        if which == 3:  # halves of a step: ties
            block[:] = (rng.integers(-254, 255, len(block)) / 2).astype(np.float32)
            block[0] = 127
        if which == 4 and rng.random() < 0.5:
            block[rng.integers(len(block))] = rng.choice([np.nan, np.inf, -np.inf])
    return x


def check_codecs(t):
    x = wild(t.rng, size_of(t.rng))
    given = t.hand(x)
    for wire in WIRES:
        expected = encode(x, wire)
        t.equal(t.ops.encode(given, wire), expected)
        t.equal(t.ops.rounded(given, wire), decode(expected, wire, len(x)), nan=wire == "int8")
        data = t.rng.integers(0, 256, wire_bytes(len(x), wire), dtype=np.uint8)
        result = t.ops.decode(t.hand(data), wire, len(x))
        t.equal(result, decode(data, wire, len(x)), nan=wire == "int8")


CHECKS = {
    name.removeprefix("check_"): check
    for name, check in sorted(globals().items())
    if name.startswith("check_")
}


def run(name, ops, maker, seed):
    """Make one check once."""
    trial = Trial(ops, maker, np.random.default_rng([seed, len(name)]), [])
    CHECKS[name](trial)
    maker.check()
    if name not in ("combine", "average"):  # they write to what they were given
        trial.untouched()
