"""The CUDA kernels, run thread by thread on the CPU, have the bits of the reference."""

import pytest

from .emulator import battery


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["numpy", "tensor"])
@pytest.mark.parametrize("name", battery.CHECKS)
def test_every_operation_has_the_bits_of_the_reference(name, kind, emulated):
    ops, makers, mock = emulated
    for seed in range(16):
        battery.run(name, ops, makers[kind], seed)
    assert mock.depth() == 0


@pytest.mark.slow
def test_tables_lie_in_memory_as_the_kernels_expect(emulated):
    from ctypes import sizeof

    from flwr_decentral_kernels.cuda.kernels import SIGNATURES

    _, _, mock = emulated
    for name, types in SIGNATURES.items():
        sizes = [
            mock.parameter_size(name.encode(), i) for i in range(mock.parameters(name.encode()))
        ]
        assert sizes == [sizeof(kind) for kind in types], name
        assert sum(-(-size // 8) * 8 for size in sizes) <= 4096, name
