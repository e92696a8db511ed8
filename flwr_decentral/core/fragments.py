"""Partitions of the flat vector into fragments.

A partition says which coordinates belong to fragment k of K. It is fixed for a run and the same on
every node, so a message carries the number of a fragment and never an index list.

**Rotation** (the default). The vector is cut into blocks of ``granularity`` g coordinates, and
``fragments`` F consecutive blocks form a *group*. Block j of group q belongs to fragment k exactly
when ``j == (k + rot(q)) mod F``, where ``rot`` is a keyed hash of q. So each fragment owns one
block of every group, in ascending order, and either direction of the mapping is a formula. Element
t of the block that fragment k owns in group q lies at ``payload[q * g + t]``; the last group may be
cut short, and the rule holds for what is left of it.

The hash, in wrapping unsigned 32-bit arithmetic, where k0 and k1 are the low and high half of the
64-bit key (the multipliers are those of the public-domain triple32)::

    h = q + k0
    h ^= h >> 17;  h *= 0xed5ad4bb
    h ^= h >> 11;  h ^= k1;  h *= 0xac4c1b51
    h ^= h >> 15;  h *= 0x31848bab
    h ^= h >> 14
    rot(q) = (h * F) >> 32            in 64 bits
    key = little-endian blake2b(pack("<QQII", seed, epoch, F, g), digest_size=8, person="fragkern1")

**Layerwise**. A seeded permutation of each tensor is cut into F parts, as in the released DivShare
code, with the remainder of each tensor spread over the fragments in turn instead of given to the
last. It needs index lists of eight bytes a coordinate and is kept for comparison.

**Interleaved**. Coordinate p belongs to fragment ``p mod F``: for two fragments, the even and the
odd coordinates.

**Contiguous**. Fragment k holds the coordinates from ``k * D // F`` up to ``(k + 1) * D // F``.
"""

from __future__ import annotations

import hashlib
import struct
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Final

import numpy as np
from numpy.typing import NDArray

from .errors import ConfigurationError

_GOLDEN_PERSON: Final = b"fragkern1"
_MIN_GROUPS: Final = 16
_MAX_GRANULARITY: Final = 64


class Partition(ABC):
    """Assign every coordinate of a vector to exactly one fragment.

    Attributes
    ----------
    size : int
        Length of the vector, D.
    fragments : int
        Number of fragments, K.
    """

    size: int
    fragments: int

    @abstractmethod
    def length(self, fragment: int) -> int:
        """Count the coordinates of a fragment."""

    @abstractmethod
    def indices(self, fragment: int) -> NDArray[np.int64]:
        """List the coordinates of a fragment in payload order."""

    def fragment_of(self, index: NDArray[np.int64]) -> NDArray[np.int64]:
        """Look up the fragments of coordinates, shape (any,)."""
        owner = np.empty(self.size, dtype=np.int64)
        for fragment in range(self.fragments):
            owner[self.indices(fragment)] = fragment
        return owner[index]

    def _check(self, fragment: int) -> None:
        if not 0 <= fragment < self.fragments:
            raise ValueError(f"fragment {fragment} is not in 0..{self.fragments - 1}")


def default_granularity(size: int, fragments: int) -> int:
    """Choose the largest power of two up to 64 that leaves at least 16 groups.

    Examples
    --------
    >>> default_granularity(89_834, 10)
    64
    >>> default_granularity(2_410, 10)
    8
    >>> default_granularity(5, 5)
    1
    """
    most = min(_MAX_GRANULARITY, size // (_MIN_GROUPS * fragments))
    return 1 << (most.bit_length() - 1) if most else 1


@dataclass(frozen=True)
class Rotation(Partition):
    """Partition by a hashed rotation of the blocks of each group.

    Parameters
    ----------
    size : int
        Length of the vector, D.
    fragments : int
        Number of fragments, 1 to D.
    granularity : int
        Coordinates of a block; a power of two.
    seed, epoch : int (default: 0)
        What the rotations are keyed with, in [0, 2**64).

    Raises
    ------
    ConfigurationError
        If a value is out of range.
    """

    size: int
    fragments: int
    granularity: int
    seed: int = 0
    epoch: int = 0

    def __post_init__(self) -> None:
        _check_fragments(self.size, self.fragments)
        if self.granularity < 1 or self.granularity & (self.granularity - 1):
            raise ConfigurationError(
                f"granularity must be a power of two, got {self.granularity}; try "
                f"{default_granularity(self.size, self.fragments)}"
            )
        _check_range("seed", self.seed)
        _check_range("epoch", self.epoch)

    @cached_property
    def key(self) -> int:
        """The 64-bit key of the hash: another value for other seeds, epochs, F or g."""
        fields = struct.pack("<QQII", self.seed, self.epoch, self.fragments, self.granularity)
        digest = hashlib.blake2b(fields, digest_size=8, person=_GOLDEN_PERSON).digest()
        return int.from_bytes(digest, "little")

    @cached_property
    def groups(self) -> int:
        """The number of groups, a last incomplete one included."""
        return -(-self.size // (self.fragments * self.granularity))

    @cached_property
    def rotations(self) -> NDArray[np.int64]:
        """``rot(q)`` of every group, shape (groups,), each in [0, fragments)."""
        low, high = np.uint32(self.key & 0xFFFFFFFF), np.uint32(self.key >> 32)
        with np.errstate(over="ignore"):
            h = np.arange(self.groups, dtype=np.uint32) + low
            h ^= h >> np.uint32(17)
            h *= np.uint32(0xED5AD4BB)
            h ^= h >> np.uint32(11)
            h ^= high
            h *= np.uint32(0xAC4C1B51)
            h ^= h >> np.uint32(15)
            h *= np.uint32(0x31848BAB)
            h ^= h >> np.uint32(14)
        return (h.astype(np.uint64) * np.uint64(self.fragments) >> np.uint64(32)).astype(np.int64)

    def blocks(self, fragment: int) -> NDArray[np.int64]:
        """List the blocks that a fragment owns, ascending, shape (groups,).

        A block may start beyond the end of the vector in the last group: it is empty then.
        """
        self._check(fragment)
        group = np.arange(self.groups, dtype=np.int64)
        return group * self.fragments + (fragment + self.rotations) % self.fragments

    def length(self, fragment: int) -> int:
        """Count the coordinates of a fragment, in O(1)."""
        self._check(fragment)
        if not self.groups:
            return 0
        last = self.groups - 1
        block = last * self.fragments + (fragment + int(self.rotations[last])) % self.fragments
        rest = min(max(self.size - block * self.granularity, 0), self.granularity)
        return last * self.granularity + rest

    def indices(self, fragment: int) -> NDArray[np.int64]:
        """List the coordinates of a fragment in payload order."""
        start = self.blocks(fragment) * self.granularity
        every = (start[:, None] + np.arange(self.granularity, dtype=np.int64)).reshape(-1)
        return every[every < self.size]

    def fragment_of(self, index: NDArray[np.int64]) -> NDArray[np.int64]:
        """Look up the fragments of coordinates, in O(1) each."""
        block = np.asarray(index, dtype=np.int64) // self.granularity
        group, position = np.divmod(block, self.fragments)
        return (position - self.rotations[group]) % self.fragments


class Layerwise(Partition):
    """Partition by a seeded permutation of each tensor.

    Parameters
    ----------
    tensors : sequence of int
        Lengths of the tensors, in the order in which they lie in the vector.
    fragments : int
        Number of fragments, 1 to D.
    seed : int (default: 0)
        Seed of the permutations, in [0, 2**64). Tensor i is permuted by numpy's Philox generator
        keyed with the BLAKE2b hash of (seed, i, its length).
    """

    def __init__(self, tensors: Sequence[int], fragments: int, seed: int = 0) -> None:
        self.size = sum(tensors)
        self.fragments = fragments
        self.seed = seed
        _check_fragments(self.size, fragments)
        _check_range("seed", seed)
        parts: list[list[NDArray[np.int64]]] = [[] for _ in range(fragments)]
        start = spare = 0
        for number, length in enumerate(tensors):
            order = start + self._permutation(number, length)
            base, rest = divmod(length, fragments)
            lengths = np.full(fragments, base)
            lengths[(spare + np.arange(rest)) % fragments] += 1
            for part, cut in zip(parts, np.split(order, np.cumsum(lengths)[:-1]), strict=True):
                part.append(cut)
            spare = (spare + rest) % fragments
            start += length
        self._indices = [np.concatenate(part) for part in parts]

    def _permutation(self, number: int, length: int) -> NDArray[np.int64]:
        fields = struct.pack("<QQQ", self.seed, number, length)
        key = int.from_bytes(hashlib.blake2b(fields, digest_size=16).digest(), "little")
        return np.random.Generator(np.random.Philox(key=key)).permutation(length)

    def length(self, fragment: int) -> int:
        """Count the coordinates of a fragment."""
        self._check(fragment)
        return len(self._indices[fragment])

    def indices(self, fragment: int) -> NDArray[np.int64]:
        """List the coordinates of a fragment in payload order."""
        self._check(fragment)
        return self._indices[fragment]


@dataclass(frozen=True)
class Interleaved(Partition):
    """Deal the coordinates out in turn.

    Parameters
    ----------
    size : int
        Length of the vector, D.
    fragments : int
        Number of fragments, 1 to D.

    Raises
    ------
    ConfigurationError
        If there are more fragments than coordinates.

    Examples
    --------
    >>> [Interleaved(5, 2).indices(fragment).tolist() for fragment in range(2)]
    [[0, 2, 4], [1, 3]]
    """

    size: int
    fragments: int

    def __post_init__(self) -> None:
        _check_fragments(self.size, self.fragments)

    def length(self, fragment: int) -> int:
        """Count the coordinates of a fragment."""
        self._check(fragment)
        return len(range(fragment, self.size, self.fragments))

    def indices(self, fragment: int) -> NDArray[np.int64]:
        """List the coordinates of a fragment in payload order."""
        self._check(fragment)
        return np.arange(fragment, self.size, self.fragments, dtype=np.int64)

    def fragment_of(self, index: NDArray[np.int64]) -> NDArray[np.int64]:
        """Look up the fragments of coordinates."""
        return np.asarray(index, dtype=np.int64) % self.fragments


@dataclass(frozen=True)
class Contiguous(Partition):
    """Cut the vector into runs of equal length, or of one coordinate more.

    Parameters
    ----------
    size : int
        Length of the vector, D.
    fragments : int
        Number of fragments, 1 to D.

    Raises
    ------
    ConfigurationError
        If there are more fragments than coordinates.

    Examples
    --------
    >>> [Contiguous(5, 2).indices(fragment).tolist() for fragment in range(2)]
    [[0, 1], [2, 3, 4]]
    """

    size: int
    fragments: int

    def __post_init__(self) -> None:
        _check_fragments(self.size, self.fragments)

    def span(self, fragment: int) -> slice:
        """Tell where a fragment lies."""
        self._check(fragment)
        start, stop = fragment * self.size, (fragment + 1) * self.size
        return slice(start // self.fragments, stop // self.fragments)

    def length(self, fragment: int) -> int:
        """Count the coordinates of a fragment."""
        span = self.span(fragment)
        return int(span.stop - span.start)

    def indices(self, fragment: int) -> NDArray[np.int64]:
        """List the coordinates of a fragment in payload order."""
        span = self.span(fragment)
        return np.arange(span.start, span.stop, dtype=np.int64)


def _check_range(name: str, value: int) -> None:
    if not 0 <= value < 2**64:
        raise ConfigurationError(f"{name} must be in [0, 2**64), got {value}")


def _check_fragments(size: int, fragments: int) -> None:
    if fragments < 1:
        raise ConfigurationError(f"fragments must be at least 1, got {fragments}")
    if fragments > max(size, 1):
        raise ConfigurationError(
            f"{fragments} fragments cannot be cut from a model of {size} shared parameters; "
            f"set fragments to at most {size}"
        )
