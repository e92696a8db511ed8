"""What is counted and measured while virtual time goes by."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

from flwr_decentral.core import Vector


@dataclass
class Traffic:
    """Bytes by their fate, headers included.

    Attributes
    ----------
    sent : int
        Put on an uplink.
    arrived : int
        Given to a machine.
    lost : int
        Sent, but lost by chance, by a broken link, or still under way at the end.
    dropped : int
        Queued, but never put on an uplink.
    """

    sent: int = 0
    arrived: int = 0
    lost: int = 0
    dropped: int = 0


def consensus_distance(models: Iterable[Vector]) -> float:
    """Compute the mean squared distance of models to their average, in float64.

    Parameters
    ----------
    models : iterable of ndarray of float32, shape (D,)
        At least one.
    """
    stack = list(models)
    center = average_model(stack)
    total = sum(float(np.square(model - center, dtype=np.float64).sum()) for model in stack)
    return total / len(stack)


def average_model(models: Iterable[Vector]) -> np.ndarray[Any, np.dtype[np.float64]]:
    """Average models in float64, shape (D,)."""
    total: Any = None
    count = 0
    for model in models:
        total = model.astype(np.float64) if total is None else np.add(total, model, out=total)
        count += 1
    if total is None:
        raise ValueError("there is no model to average")
    total /= count
    return total  # type: ignore[no-any-return]
