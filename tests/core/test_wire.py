"""Forms of payloads: their sizes and their names."""

from __future__ import annotations

import pytest

from flwr_decentral.core import ConfigurationError
from flwr_decentral.core.wire import WIRES, check_wire, wire_bytes


@pytest.mark.parametrize(
    ("wire", "length", "nbytes"),
    [
        ("float32", 3, 12),
        ("bfloat16", 3, 6),
        ("float16", 3, 6),
        ("int8", 0, 0),
        ("int8", 1, 5),
        ("int8", 256, 260),
        ("int8", 257, 265),
    ],
)
def test_sizes(wire, length, nbytes):
    assert wire_bytes(length, wire) == nbytes


def test_an_unknown_form_is_refused_with_the_nearest_one():
    for wire in WIRES:
        check_wire(wire)
    for call in (lambda: check_wire("bfloat"), lambda: wire_bytes(3, "bfloat")):
        with pytest.raises(ConfigurationError, match="bfloat16"):
            call()
