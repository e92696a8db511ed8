"""What the CUDA kernels cost, next to a copy on the same GPU and to the released DivShare code.

The median time of a call between two events of the stream, results newly made by torch each time.
*Floor* is the time that a copy of as many bytes takes, measured in the same run. F = 10 fragments,
and an inbox with J = 6 of each. *Official* are the tensor operations of the released DivShare code
on the GPU, for one layer.

    python strategies/kernels/bench/bench_cuda.py --sizes 100000 1000000 10000000 100000000
"""

import argparse
import statistics

import torch

from flwr_decentral.core import WIRES, Rotation
from flwr_decentral.ops import Piece
from flwr_decentral_kernels.cuda import Cuda

FRAGMENTS, COPIES, REPEATS = 10, 6, 30


def cost(call):
    """Measure a call in milliseconds."""
    times = []
    for _ in range(REPEATS + 5):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        call()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    return statistics.median(times[5:])


def official(x):
    """Measure packing and averaging as the released DivShare code does them."""
    order = torch.randperm(len(x), device=x.device)
    lists = list(order.chunk(FRAGMENTS))
    payloads = [x[each] for each in lists]

    def average():
        total, count = x.clone(), torch.ones_like(x)
        for _ in range(COPIES):
            for each, payload in zip(lists, payloads, strict=True):
                total[each] += payload
                count[each] += 1
        return total * (1 / count)

    return cost(lambda: [x[each] for each in lists]), cost(average)


def measure(ops, size):
    """Print the table of one size."""
    x, y, z, t = (torch.randn(size, device="cuda") for _ in range(4))
    out = torch.empty_like(x)
    copy = cost(lambda: out.copy_(x))
    packing, averaging = official(x)
    print(f"\n### {size:,} values\n")
    print(f"A copy takes {copy:.4f} ms, {8 * size / copy / 1e6:,.0f} GB/s.\n")
    print("| | ms | GB/s | × floor | × faster than official |")
    print("|---|---|---|---|---|")

    def row(what, width, call, base=0.0):
        """Measure a call that moves so many bytes for each value."""
        ms = cost(call)
        speed, floor = width * size / ms / 1e6, copy * width / 8
        times = f"{base / ms:.0f}" if base else ""
        print(f"| {what} | {ms:.4f} | {speed:,.0f} | {ms / floor:.2f} | {times} |", flush=True)

    for granularity in (1, 64, 1024):
        partition = Rotation(size, FRAGMENTS, granularity, 1)
        payloads = ops.pack_all(x, partition)
        pieces = [Piece(k, payload) for _ in range(COPIES) for k, payload in enumerate(payloads)]
        g = f"g = {granularity}"
        row(f"pack all, {g}", 8, lambda p=partition: ops.pack_all(x, p), packing)
        row(f"pack one, {g}", 8 / FRAGMENTS, lambda p=partition: ops.pack(x, p, 3))
        row(f"assemble, {g}", 8, lambda p=partition, v=payloads: ops.assemble(p, v))
        row(
            f"average with 60 fragments, {g}",
            8 + 4 * COPIES,
            lambda p=partition, v=pieces: ops.average(x, p, v, out=out),
            averaging,
        )
    vectors = [x, y, z, t]
    row("update", 16, lambda: ops.update(x, y, z))
    row("combine 4", 20, lambda: ops.combine(vectors, [0.25] * 4, out=out))
    row("pairwise", 16, lambda: ops.pairwise(x, y, z, 0.5))
    row("mix", 16, lambda: ops.mix(x, y, 0.3))
    row("mix_pairwise", 24, lambda: ops.mix_pairwise(*vectors, share=0.3, weights=(0.5, 0.9)))
    row("mix_update", 24, lambda: ops.mix_update(*vectors, share=0.3))
    row("sums without each of 4", 32, lambda: ops.sums_without(vectors, [0, 1, 2, 3]))
    row("finite", 4, lambda: ops.finite(x))
    for wire, width in zip(WIRES[1:], (6, 6, 5), strict=True):
        data = ops.encode(x, wire)
        row(f"encode {wire}", width, lambda w=wire: ops.encode(x, w))
        row(f"decode {wire}", width, lambda w=wire, d=data: ops.decode(d, w, size))


def main():
    """Measure all sizes."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sizes", type=int, nargs="+", default=[10**5, 10**6, 10**7, 10**8])
    arguments = parser.parse_args()
    ops = Cuda()
    print(f"{ops.describe()}; torch {torch.__version__}")
    for size in arguments.sizes:
        measure(ops, size)


if __name__ == "__main__":
    main()
