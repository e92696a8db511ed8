"""A long run ends with the memory that it had when it was young."""

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

pytestmark = pytest.mark.skipif(
    sys.platform != "linux" or find_spec("ray") is None, reason="needs Linux and ray"
)


@pytest.mark.parametrize(
    "dispatch",
    [
        pytest.param("packed", marks=pytest.mark.flower),
        pytest.param("message", marks=pytest.mark.bench),  # takes minutes
    ],
)
def test_memory_does_not_grow_with_the_rounds(dispatch, tmp_path):
    script = Path(__file__).with_name("memory_run.py")
    done = subprocess.run(
        [sys.executable, script, dispatch, tmp_path],
        env=os.environ | {"FLWR_HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-5000:]
    used = {entry.pop("round"): entry for entry in json.loads(done.stdout.splitlines()[-1])}
    assert max(used) == 200
    assert min(used[20].values()) > 50e6, "these are whole Python processes"
    for process, early in used[20].items():
        assert used[200][process] <= 1.05 * early, f"{process}: {used}"
