"""What the compiled kernels cost, next to numpy, to the released DivShare code, and to a floor.

One thread; the median of its CPU time, which leaves out what other processes take. F = 10
fragments, and an inbox with J = 6 of each. *Official* are the tensor operations of the released
DivShare code: a random permutation of each layer, cut into F index lists; a fragment is what one of
them selects; to average is to add each payload, and 1, where its list says, and to multiply by
1 / count. The *floor* is measured in the same run: to copy the vector, for packing; to average six
whole vectors with it, for averaging, which moves the same bytes. Results are written to memory that
is used again.

    python strategies/kernels/bench/bench_native.py --sizes 100000 1000000 10000000
"""

from __future__ import annotations

import argparse
import ctypes
import time
from collections.abc import Callable

import numpy as np
import torch

from flwr_decentral.core import WIRES, Rotation
from flwr_decentral.ops import Piece, Reference
from flwr_decentral_kernels import Native

FRAGMENTS, COPIES = 10, 6
GRANULARITIES = (1, 64, 1024)
LAYERS = (25_000, 250_000, 2_360_000, 2_360_000)
WHOLE_VECTOR_SIZE = 10_000_000


def cost(work: Callable[[], object], least: int = 3, budget: float = 1.0) -> float:
    """Measure how many milliseconds of CPU time something takes."""
    work()
    times: list[float] = []
    while len(times) < least or (sum(times) < budget and len(times) < 201):
        start = time.thread_time()
        work()
        times.append(time.thread_time() - start)
    return sorted(times)[len(times) // 2] * 1e3


def official_lists(size: int) -> list[torch.Tensor]:
    """Cut a random permutation of each layer into fragments."""
    generator = torch.Generator().manual_seed(1)
    parts: list[list[torch.Tensor]] = [[] for _ in range(FRAGMENTS)]
    start = layer = 0
    while start < size:
        length = min(LAYERS[layer % len(LAYERS)], size - start)
        order = torch.randperm(length, generator=generator) + start
        for part, cut in zip(parts, order.chunk(FRAGMENTS), strict=False):
            part.append(cut)
        start, layer = start + length, layer + 1
    return [torch.cat(part) for part in parts]


def official(size: int, once: bool) -> tuple[float, float]:
    """Measure the released code's way to pack all fragments, and to average an inbox."""
    lists, x = official_lists(size), torch.randn(size)
    inbox = [(k, torch.randn(len(lists[k]))) for _ in range(COPIES) for k in range(FRAGMENTS)]

    def average() -> torch.Tensor:
        total, count = x.clone(), torch.ones(size)
        for k, payload in inbox:
            total[lists[k]] += payload
            count[lists[k]] += 1
        return total * (1 / count)

    packing = cost(lambda: [x[indices] for indices in lists], 1 if once else 3)
    if once:
        start = time.thread_time()
        average()
        return packing, (time.thread_time() - start) * 1e3
    return packing, cost(average)


def fragments(size: int, skip_official: bool) -> None:
    """Print the tables of packing and averaging for vectors of one size."""
    x = np.random.default_rng(0).standard_normal(size, dtype=np.float32)
    out, native, reference = x.copy(), Native(), Reference()
    copying = cost(lambda: ctypes.memmove(out.ctypes.data, x.ctypes.data, 4 * size))
    memory = np.full((FRAGMENTS * COPIES, size // FRAGMENTS + 2048), 0.5, np.float32)
    flat = memory.reshape(-1)
    whole = [Piece(0, flat[j * size : (j + 1) * size]) for j in range(COPIES)]
    averaging = cost(lambda: native.average(x, Rotation(size, 1, 1024), whole, out=out))
    packed, averaged = (0.0, 0.0) if skip_official else official(size, size > 2e7)

    print(f"\n### {size:,} values\n")
    print("| | ms | × floor | × faster than official | × faster than numpy |")
    print("|---|---|---|---|---|")

    def row(what: str, ms: float, floor: float, base: float, numpy: float) -> None:
        times = f"{base / ms:.0f}" if base else "-"
        print(f"| {what} | {ms:.3g} | {ms / floor:.2f} | {times} | {numpy / ms:.1f} |", flush=True)

    def plain(what: str, ms: float) -> None:
        print(f"| {what} | {ms:.3g} | | | |", flush=True)

    plain("floor: copy the vector", copying)
    if packed:
        plain("official: pack all fragments", packed)
    partitions = [Rotation(size, FRAGMENTS, granularity) for granularity in GRANULARITIES]
    for partition in partitions:
        numpy = cost(lambda p=partition: reference.pack_all(x, p))
        ms = cost(lambda p=partition: native.pack_all(x, p))
        row(f"pack all fragments, g = {partition.granularity}", ms, copying, packed, numpy)
    plain("floor: average with six vectors", averaging)
    if averaged:
        plain("official: average with 60 fragments", averaged)
    for partition in partitions:
        pieces = [
            Piece(k, memory[j * FRAGMENTS + k, : partition.length(k)])
            for j in range(COPIES)
            for k in range(FRAGMENTS)
        ]
        numpy = cost(lambda p=partition, i=pieces: reference.average(x, p, i, out=out))
        ms = cost(lambda p=partition, i=pieces: native.average(x, p, i, out=out))
        row(
            f"average with 60 fragments, g = {partition.granularity}",
            ms,
            averaging,
            averaged,
            numpy,
        )
    payloads = native.pack_all(x, partitions[1])
    numpy = cost(lambda: reference.assemble(partitions[1], payloads))
    ms = cost(lambda: native.assemble(partitions[1], payloads))
    row("assemble, g = 64", ms, copying, 0, numpy)


def whole_vectors(size: int) -> None:
    """Print the table of operations on whole vectors."""
    rng = np.random.default_rng(1)
    x, y, z, t, u = (rng.standard_normal(size, dtype=np.float32) for _ in range(5))
    native, reference = Native(), Reference()
    calls = {
        "update": lambda ops: ops.update(x, y, z),
        "combine 6": lambda ops: ops.combine([x, y, z, t, u, x], [0.1] * 6),
        "pairwise": lambda ops: ops.pairwise(x, y, z, 0.5),
        "mix": lambda ops: ops.mix(x, y, 0.1),
        "mix_pairwise": lambda ops: ops.mix_pairwise(x, y, z, t, share=0.1, weights=(0.5, 0.7)),
        "mix_update": lambda ops: ops.mix_update(x, y, z, t, share=0.1),
        "sums_without, each of 5": lambda ops: ops.sums_without([x, y, z, t, u], range(5)),
        "finite": lambda ops: ops.finite(x),
    }
    for wire in WIRES[1:]:
        data = reference.encode(x, wire)
        calls[f"encode {wire}"] = lambda ops, w=wire: ops.encode(x, w)
        calls[f"decode {wire}"] = lambda ops, w=wire, d=data: ops.decode(d, w, size)
    print(f"\n### Whole vectors of {size:,} values\n")
    print("| | ms | numpy, ms | × faster |")
    print("|---|---|---|---|")
    for what, call in calls.items():
        slow, fast = cost(lambda c=call: c(reference)), cost(lambda c=call: c(native))
        print(f"| {what} | {fast:.3g} | {slow:.3g} | {slow / fast:.1f} |", flush=True)


def main() -> None:
    """Print all tables."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--sizes", type=int, nargs="*", default=[10**5, 10**6, 10**7, 10**8])
    parser.add_argument("--skip-official", action="store_true", help="it takes minutes at 10**8")
    parser.add_argument("--skip-whole", action="store_true", help="only fragments")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    print(f"{Native().describe()}; numpy {np.__version__}, torch {torch.__version__}")
    for size in arguments.sizes:
        fragments(size, arguments.skip_official)
    if not arguments.skip_whole:
        whole_vectors(WHOLE_VECTOR_SIZE)


if __name__ == "__main__":
    main()
