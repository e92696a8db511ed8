"""The tests in the emulator notice when the CUDA kernels are wrong.

Each mutant is a version of ``kernels.cu`` with one mistake in it. The tests of the bits run on it
in a process of their own, which may well crash, and must fail.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from .conftest import READY

pytestmark = pytest.mark.bench

# name: what is replaced, by what, and the checks that have to notice
MUTANTS = {
    "one-chunk-too-many": ("chunk < extent.chunks", "chunk <= extent.chunks", "mix"),
    "one-value-too-many": ("i < extent.length; i +=", "i <= extent.length; i +=", "update"),
    "no-value-left-over": ("i = 4 * extent.chunks + thread()", "i = extent.length", "pairwise"),
    "sum-in-another-order": ("x + (after - before)", "(x + after) - before", "update"),
    "never-assigned": ("x == before ? after : ", "", "mix_update"),
    "flow-of-the-moved": ("y = y - step", "y = y - share * (y - x)", "mix"),
    "always-flows": ("if (flows) flow", "if (flows + 1) flow", "mix_pairwise"),
    "weight-of-another": ("v.at[l] * terms.weight[k]", "v.at[l] * terms.weight[0]", "combine"),
    "forgets-earlier-terms": ("if (terms.resumes)", "if (false)", "combine"),
    "begins-with-zero": ("begins ? v", "begins && !s.count ? v", "sums_without"),
    "begins-too-early": ("s.left_out[m] == 0 ? 1u : 0u", "0u", "sums_without"),
    "turned-the-other-way": ("slot - rotation :", "slot - rotation + 1 :", "average"),
    "always-turned": ("r.turns ? fdk_rotation(&p, group) : 0u", "fdk_rotation(&p, group)", "pack"),
    "table-from-zero": (
        "place.fragment - payloads.first",
        "place.fragment",
        "pack_all_and_assemble",
    ),
    "factor-of-another": ("*= inbox.factor[at]", "*= inbox.factor[0]", "average"),
    "leaves-out-what-nobody-sent": ("if (out != x) store", "if (false) store", "average"),
    "not-a-number-is-one": (
        "& 0x7f800000u) == 0x7f800000u",
        "& 0x7fffffffu) == 0x7f800000u",
        "finite",
    ),
    "peak-of-a-lane": ("__reduce_max_sync(0xffffffffu, peak)", "peak", "codecs"),
    "a-lane-stays-away": ("block < blocks;", "block < blocks - (lane == 5);", "codecs"),
    "reads-past-the-end": ("if (i < 4 * extent.chunks)", "if (i < extent.length)", "codecs"),
    "scale-of-half-a-block": ("scales[i / FDK_BLOCK]", "scales[i / (FDK_BLOCK / 2)]", "codecs"),
}


@pytest.fixture(scope="session")
def driver(tmp_path_factory):
    from .emulator import build

    if build.compiler() is None:
        pytest.skip("there is no g++ to build the emulator with")
    return build.build_driver(tmp_path_factory.mktemp("mock_driver"))


def built(folder, driver, text):
    """Build a version of the kernels."""
    from .emulator import build

    kernels = folder / "kernels.cu"
    kernels.write_text(text)
    return build.build(folder, driver, kernels)


@pytest.fixture(scope="session")
def unchanged(driver, tmp_path_factory):
    from .emulator import build

    return built(tmp_path_factory.mktemp("unchanged"), driver, build.KERNELS.read_text())


def verdict(library, check):
    """Run a check on what was built."""
    file = Path(__file__).with_name("test_cuda_bits.py")
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-m", "slow", "-p", "no:cacheprovider"]
    return subprocess.run(
        [*command, str(file), "-k", f"[{check}-tensor]"],
        env=os.environ | {READY: str(library)},
        capture_output=True,
        text=True,
        timeout=300,
    )


@pytest.mark.parametrize("name", MUTANTS)
def test_a_mutant_is_noticed(name, driver, tmp_path):
    from .emulator import build

    old, new, check = MUTANTS[name]
    text = build.KERNELS.read_text()
    assert text.count(old) >= 1, "the kernels have changed: write the mutant anew"
    done = verdict(built(tmp_path, driver, text.replace(old, new)), check)
    # 1 is a failed test; below zero a signal has ended the process. Others are no verdict.
    assert done.returncode == 1 or done.returncode < 0, f"{name} survives\n{done.stdout}"


@pytest.mark.parametrize("check", sorted({check for _, _, check in MUTANTS.values()}))
def test_the_kernels_themselves_pass(check, unchanged):
    done = verdict(unchanged, check)
    assert done.returncode == 0, done.stdout
    assert "1 passed" in done.stdout
