"""What kernels of fragments are told: regions of a partition, and tables of addresses."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final, NamedTuple

import numpy as np

from flwr_decentral.core.fragments import Contiguous, Interleaved, Partition, Rotation

from .kernels import MOST_AVERAGED, MOST_FRAGMENTS, MOST_PIECES, Extent, Inbox, Payloads, Turns

_CHUNK: Final = 16
"""Bytes that a thread moves at once, from addresses that are a multiple of it."""

_LARGE_ENOUGH: Final = 4
"""Granularity from which on a chunk of four values never crosses the end of a block."""

_MOST: Final = 2**31
"""Blocks and fragments that the kernels can number."""

WHOLE: Final = Turns(fragments=1, shift=6)
"""A partition into one fragment."""


class Region(NamedTuple):
    """Successive coordinates that are cut by a rotation, into fragments numbered from `first`."""

    start: int
    stop: int
    first: int
    turns: Turns


def extent(length: int, *addresses: int, chunked: bool = True) -> Extent:
    """Say how much of a launch goes by chunks of four: none where an address does not allow it."""
    whole = chunked and not any(address % _CHUNK for address in addresses)
    return Extent(length, length // 4 if whole else 0)


def threads(of: Extent) -> int:
    """Count the threads that have something to do."""
    return int(max(of.chunks, of.length - 4 * of.chunks))


def is_known(partition: Partition) -> bool:
    """Tell whether there are kernels for a partition."""
    # Not isinstance: a subclass may cut differently.
    return type(partition) in (Rotation, Interleaved, Contiguous)


def regions(partition: Partition) -> Iterator[Region]:
    """List the regions of a partition that there are kernels for."""
    if isinstance(partition, Contiguous):
        yield from (region_of(partition, k) for k in range(partition.fragments))
    else:
        yield region_of(partition, 0)


def region_of(partition: Partition, fragment: int) -> Region:
    """Give the region that holds a fragment."""
    if isinstance(partition, Contiguous):
        span = partition.span(fragment)
        return Region(span.start, span.stop, fragment, WHOLE)
    if isinstance(partition, Rotation):
        shift = partition.granularity.bit_length() - 1
        low, high = partition.key & 0xFFFFFFFF, partition.key >> 32
        turns = Turns(partition.fragments, shift, low, high, 1)
    else:
        # The coordinates dealt out in turn: groups of single coordinates, none of them turned.
        turns = Turns(partition.fragments, 0, 0, 0, 0)
    if max(partition.size >> turns.shift, partition.fragments) >= _MOST:
        raise ValueError(
            f"{partition.fragments} fragments of {partition.size} values in blocks of "
            f"{1 << turns.shift} are too many to number; take larger blocks, or fewer fragments"
        )
    return Region(0, partition.size, 0, turns)


def extent_of(region: Region, length: int, *addresses: int) -> Extent:
    """Say how much of a launch over a region goes by chunks."""
    return extent(length, *addresses, chunked=1 << region.turns.shift >= _LARGE_ENOUGH)


def tables(
    region: Region, addresses: Sequence[int], whole: int
) -> Iterator[tuple[Payloads, Extent]]:
    """List the payloads of a region, as many as fit at a time."""
    length, count = region.stop - region.start, region.turns.fragments
    for first in range(0, count, MOST_FRAGMENTS):
        begin = region.first + first
        part = addresses[begin : min(begin + MOST_FRAGMENTS, region.first + count)]
        table = Payloads(first=first, count=len(part))
        table.of[: len(part)] = part
        yield table, extent_of(region, length, whole, *part)


def inboxes(pieces: Sequence[Sequence[int]]) -> Iterator[tuple[Inbox, list[int]]]:
    """Cut an inbox into tables, always at least one.

    Parameters
    ----------
    pieces : sequence of sequence of int
        The addresses of what was received of each fragment, in their order.

    Yields
    ------
    table : Inbox
    read : list of int
        The addresses in it.
    """
    # (fragment, addresses, factor): a fragment of more pieces than fit is averaged in steps.
    steps: list[tuple[int, Sequence[int], float]] = []
    for fragment, addresses in enumerate(pieces):
        factor = float(np.float32(1) / np.float32(1 + len(addresses)))
        for start in range(0, len(addresses), MOST_PIECES):
            last = start + MOST_PIECES >= len(addresses)
            part = addresses[start : start + MOST_PIECES]
            steps.append((fragment, part, factor if last else 1.0))
    if not steps:
        yield Inbox(), []
    while steps:
        inbox, read = Inbox(first=steps[0][0]), list[int]()
        while steps:
            fragment, part, factor = steps[0]
            at = fragment - inbox.first
            full = at >= MOST_AVERAGED or len(read) + len(part) > MOST_PIECES
            if full or at < inbox.fragments:
                break
            # Fragments in between, of which nothing came, are empty.
            inbox.begin[inbox.fragments : at + 1] = [len(read)] * (at + 1 - inbox.fragments)
            read += part
            inbox.factor[at], inbox.begin[at + 1] = factor, len(read)
            inbox.fragments = at + 1
            steps.pop(0)
        inbox.piece[: len(read)] = read
        yield inbox, read
