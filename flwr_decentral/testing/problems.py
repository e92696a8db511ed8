"""Training problems of milliseconds, in numpy alone: they repeat to the last bit.

Each has an ``initial`` vector and a ``train(node, round, vector)`` for a
:class:`~flwr_decentral.testing.Cluster`. What is random is drawn for each (node, round) anew, so
that the order in which nodes train does not matter.

==================  =============================================================================
:class:`Targets`    each node pulls toward a point of its own; a model of three tensors
:class:`Quadratics` least squares with curvatures and optima that differ by node
:class:`Digits`     a 64-32-10 perceptron on scikit-learn's digits, few labels on each node
==================  =============================================================================
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from flwr_decentral.core import ConfigurationError, Seeds, Vector
from flwr_decentral.core.seeds import RUN

Floats = NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class Targets:
    """Pull each node's vector toward a point of its own: f_i(x) = ½‖x − b_i‖².

    Parameters
    ----------
    nodes : int
        Number of nodes.
    rate : float (default: 0.1)
        The share of the way that one training covers.
    seed : int (default: 0)
        What the points b_i and the initial model are drawn with.

    Notes
    -----
    The model has three tensors of 30, 6 and 1 values, in :attr:`tensors`.
    """

    nodes: int
    rate: float = 0.1
    seed: int = 0

    @cached_property
    def tensors(self) -> dict[str, Vector]:
        """The initial model, by tensor."""
        draw = Seeds(self.seed).generator(RUN, "initial").standard_normal
        shapes = {"weight": (5, 6), "bias": (6,), "scale": (1,)}
        return {name: draw(shape).astype(np.float32) for name, shape in shapes.items()}

    @cached_property
    def initial(self) -> Vector:
        """The initial model, flat, shape (37,)."""
        return np.concatenate([tensor.reshape(-1) for tensor in self.tensors.values()])

    @cached_property
    def points(self) -> Vector:
        """The points b_i, shape (nodes, 37)."""
        draw = Seeds(self.seed).generator(RUN, "points").standard_normal
        points: Floats = draw((self.nodes, len(self.initial)))
        return points.astype(np.float32)

    def train(self, node: int, round: int, vector: Vector) -> Vector:
        """Go toward the node's point, from a vector of any length up to 37."""
        del round
        return vector + np.float32(self.rate) * (self.points[node, : len(vector)] - vector)


@dataclass(frozen=True, kw_only=True)
class Quadratics:
    """Minimize the mean of f_i(x) = ½‖A_i x − b_i‖², by exact gradient steps.

    Parameters
    ----------
    nodes : int
        Number of nodes, n.
    size : int (default: 10)
        Length of the vector, d.
    rate : float (default: 0.1)
        Learning rate γ.
    curvature : tuple of float (default: (0.1, 1.0))
        The least and the greatest eigenvalue of each A_iᵀA_i.
    heterogeneity : float (default: 1.0)
        ζ² = (1/n) Σ‖∇f_i(x*)‖²: how far the nodes disagree at the common optimum.
    distance : float (default: 10.0)
        ‖x*‖; the initial vector is 0.
    seed : int (default: 0)
        What the problem is drawn with.
    """

    nodes: int
    size: int = 10
    rate: float = 0.1
    curvature: tuple[float, float] = (0.1, 1.0)
    heterogeneity: float = 1.0
    distance: float = 10.0
    seed: int = 0

    @cached_property
    def initial(self) -> Vector:
        """The initial vector: zeros, shape (size,)."""
        return np.zeros(self.size, np.float32)

    @cached_property
    def optimum(self) -> Floats:
        """The minimizer x* of the mean, shape (size,)."""
        direction = self._draw("optimum", (self.size,))
        return direction * (self.distance / float(np.linalg.norm(direction)))

    @cached_property
    def hessians(self) -> Floats:
        """A_iᵀA_i of every node, shape (nodes, size, size)."""
        bases: Floats = np.linalg.qr(self._draw("bases", (self.nodes, self.size, self.size)))[0]
        eigenvalues: Floats = np.linspace(*self.curvature, self.size)
        hessians: Floats = (bases * eigenvalues) @ bases.transpose(0, 2, 1)
        return hessians

    @cached_property
    def pulls(self) -> Floats:
        """∇f_i(x*) of every node, which add up to 0, shape (nodes, size)."""
        pulls = self._draw("pulls", (self.nodes, self.size))
        pulls -= pulls.mean(axis=0)
        squares = float(np.square(pulls).sum(axis=1).mean())
        return pulls * (self.heterogeneity / squares) ** 0.5 if squares else pulls

    def train(self, node: int, round: int, vector: Vector) -> Vector:
        """Take one exact gradient step, in float64."""
        del round
        x = vector.astype(np.float64)
        gradient: Floats = self.hessians[node] @ (x - self.optimum) + self.pulls[node]
        x -= self.rate * gradient
        return x.astype(np.float32)

    def error(self, models: NDArray[Any]) -> float:
        """Compute the mean of ‖x_i − x*‖² over models, shape (any, size)."""
        return float(np.square(models - self.optimum).sum(axis=1).mean())

    def _draw(self, purpose: str, shape: tuple[int, ...]) -> Floats:
        return Seeds(self.seed).generator(RUN, purpose).standard_normal(shape)


_TEST_SIZE: Final = 360
_SHAPES: Final = {"w1": (64, 32), "b1": (32,), "w2": (32, 10), "b2": (10,)}


@dataclass(frozen=True, kw_only=True)
class Digits:
    """Train a 64-32-10 ReLU perceptron, D = 2,410, on 1,437 of scikit-learn's 1,797 digits.

    The training examples are sorted by label and cut into ``nodes * shards`` runs, which are dealt
    out at random: with two shards, a node sees about two of the ten labels. Not dealt out, they go
    to the nodes in their order: then neighbors of a ring see the same labels or the next.

    Parameters
    ----------
    nodes : int
        Number of nodes.
    shards : int (default: 2)
        Runs of the sorted examples on each node.
    dealt : bool (default: True)
        Deal the runs out at random.
    rate : float (default: 0.1)
        Learning rate γ.
    steps : int (default: 8)
        Minibatches in one training, H.
    batch : int (default: 8)
        Examples of a minibatch.
    seed : int (default: 0)
        What everything is drawn with.
    """

    nodes: int
    shards: int = 2
    dealt: bool = True
    rate: float = 0.1
    steps: int = 8
    batch: int = 8
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0 < self.nodes * self.shards <= _examples()[0].shape[0] - _TEST_SIZE:
            raise ConfigurationError(f"{self.nodes} nodes cannot have {self.shards} shards each")

    @cached_property
    def tensors(self) -> dict[str, Vector]:
        """The initial model, by tensor: uniform within ±1/√(fan in), biases too."""
        generator = Seeds(self.seed).generator(RUN, "initial")
        fan_in = {"w1": 64, "b1": 64, "w2": 32, "b2": 32}
        return {
            name: (generator.uniform(-1, 1, shape) / np.sqrt(fan_in[name])).astype(np.float32)
            for name, shape in _SHAPES.items()
        }

    @cached_property
    def initial(self) -> Vector:
        """The initial model, flat, shape (2410,)."""
        return np.concatenate([tensor.reshape(-1) for tensor in self.tensors.values()])

    def train(self, node: int, round: int, vector: Vector) -> Vector:
        """Take minibatch steps on the node's own examples."""
        images, labels = self._shares[node]
        draw = Seeds(self.seed).generator(node, f"train-{round}").integers
        vector = vector.copy()
        for chosen in draw(len(labels), size=(self.steps, self.batch)):
            _descend(vector, images[chosen], labels[chosen], np.float32(self.rate))
        return vector

    def accuracy(self, vector: Vector) -> float:
        """Compute the share of the 360 test digits that a model recognizes."""
        images, labels = self._test
        return float((_forward(vector, images)[1].argmax(axis=1) == labels).mean())

    @cached_property
    def _order(self) -> NDArray[np.int64]:
        return Seeds(self.seed).generator(RUN, "split").permutation(len(_examples()[1]))

    @cached_property
    def _test(self) -> tuple[Vector, NDArray[np.int64]]:
        images, labels = _examples()
        return images[self._order[:_TEST_SIZE]], labels[self._order[:_TEST_SIZE]]

    @cached_property
    def _shares(self) -> list[tuple[Vector, NDArray[np.int64]]]:
        images, labels = _examples()
        rest = self._order[_TEST_SIZE:]
        by_label = rest[np.argsort(labels[rest], kind="stable")]
        runs = np.array_split(by_label, self.nodes * self.shards)
        order = np.arange(len(runs)).reshape(self.nodes, self.shards).T.reshape(-1)
        if self.dealt:
            order = Seeds(self.seed).generator(RUN, "shards").permutation(len(runs))
        shares = [
            np.concatenate([runs[run] for run in order[node :: self.nodes]])
            for node in range(self.nodes)
        ]
        return [(images[share], labels[share]) for share in shares]


@lru_cache(maxsize=1)
def _examples() -> tuple[Vector, NDArray[np.int64]]:
    """Load the 1,797 digits: pixels in [0, 1], shape (1797, 64), and labels."""
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    return (images / 16).astype(np.float32), labels.astype(np.int64)


def _layers(vector: Vector) -> list[Vector]:
    """View a vector as the weights and biases of both layers."""
    layers, start = [], 0
    for shape in _SHAPES.values():
        length = int(np.prod(shape))
        layers.append(vector[start : start + length].reshape(shape))
        start += length
    return layers


def _forward(vector: Vector, images: Vector) -> tuple[Vector, Vector]:
    """Compute hidden activations and logits."""
    w1, b1, w2, b2 = _layers(vector)
    hidden = np.maximum(images @ w1 + b1, np.float32(0))
    return hidden, hidden @ w2 + b2


def _descend(vector: Vector, images: Vector, labels: NDArray[np.int64], rate: np.float32) -> None:
    """Take one step of gradient descent on the mean cross-entropy, in place."""
    w1, b1, w2, b2 = _layers(vector)
    hidden, logits = _forward(vector, images)
    logits -= logits.max(axis=1, keepdims=True)
    slope = np.exp(logits)
    slope /= slope.sum(axis=1, keepdims=True)
    slope[np.arange(len(labels)), labels] -= 1
    slope *= rate / np.float32(len(labels))
    back = (slope @ w2.T) * (hidden > 0)
    w2 -= hidden.T @ slope
    b2 -= slope.sum(axis=0)
    w1 -= images.T @ back
    b1 -= back.sum(axis=0)
