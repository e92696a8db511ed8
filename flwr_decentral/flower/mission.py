"""What decides a run in real time."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from flwr.app import ArrayRecord

from flwr_decentral.core import Algorithm
from flwr_decentral.core.algorithm import Topology
from flwr_decentral.core.layout import Layout

from .evaluation import EvaluateFn
from .settings import FedAvgOptions, Settings


@dataclass(frozen=True, kw_only=True)
class Mission:
    """What decides a run in real time.

    Attributes
    ----------
    algorithm : Algorithm
        What each node runs.
    version : str
        Version of the package that brings it.
    topology : networkx.Graph
        Who may talk to whom.
    layout : Layout
        How the model lies in a vector.
    initial : ArrayRecord
        The model that all nodes start from.
    settings : Settings
        Segments, keys, seed, evaluation.
    options : FedAvgOptions
        What FedAvg would have been given.
    rounds : int or None
        Local rounds of each node.
    evaluate_every : int
        Rounds from one evaluation to the next.
    patience : float
        Seconds that one training or evaluation may take.
    train_config, evaluate_config : mapping
        What the user's functions get in their config.
    evaluate_fn : callable, optional
        Evaluates the average of all models.
    uplinks : tuple of float
        The most bits per second that each node may send.
    """

    algorithm: Algorithm
    version: str
    topology: Topology
    layout: Layout
    initial: ArrayRecord
    settings: Settings
    options: FedAvgOptions
    rounds: int | None
    evaluate_every: int
    patience: float
    train_config: Mapping[str, Any]
    evaluate_config: Mapping[str, Any]
    evaluate_fn: EvaluateFn | None
    uplinks: tuple[float, ...]
