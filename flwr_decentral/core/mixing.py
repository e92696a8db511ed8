"""Mixing matrices: the weights of a gossip average, and how fast it forgets.

The weights are those of Metropolis and Hastings. An edge between nodes of degree d_i and d_j weighs

    w_ij = 1 / (1 + max(d_i, d_j)),        w_ii = 1 - sum over j of w_ij,

and all other pairs weigh nothing. A node needs its own degree and those of its neighbors only. The
matrix W is symmetric, its rows and columns sum to 1, and its diagonal is at least 1/(1 + d_max).
So a round of averaging, X <- W X, keeps the mean of the models, leaves a consensus as it is, and
brings the models nearer to their mean by the second eigenvalue:

    ||W X - mean|| <= |lambda_2| ||X - mean||.

On a ring lambda_2 is (1 + 2 cos(2 pi / n)) / 3: rounds until the squared distance has shrunk to one
millionth are 32 for n = 8, 133 for 16, 536 for 32 and 2,149 for 64.
"""

from __future__ import annotations

import networkx as nx
import numpy as np
from numpy.typing import NDArray

from .errors import ConfigurationError


def metropolis_weight(degree_a: int, degree_b: int) -> float:
    """Weigh an edge between nodes of two degrees, the same from either end.

    Examples
    --------
    >>> metropolis_weight(1, 3)
    0.25
    """
    return 1.0 / (1 + max(degree_a, degree_b))


def metropolis_hastings(graph: nx.Graph[int]) -> NDArray[np.float64]:
    """Weigh every edge of a topology.

    Parameters
    ----------
    graph : networkx.Graph
        A simple undirected graph on the nodes 0 to n-1.

    Returns
    -------
    ndarray of float64, shape (n, n)
        The mixing matrix W.

    Raises
    ------
    ConfigurationError
        If a node has an edge to itself.

    Examples
    --------
    >>> metropolis_hastings(nx.path_graph(2))
    array([[0.5, 0.5],
           [0.5, 0.5]])
    """
    weights = np.zeros((len(graph), len(graph)))
    degree = dict(graph.degree)
    for a, b in graph.edges:
        if a == b:
            raise ConfigurationError(f"node {a} has an edge to itself; remove it")
        weights[a, b] = weights[b, a] = metropolis_weight(degree[a], degree[b])
    np.fill_diagonal(weights, 1.0 - weights.sum(axis=1))
    return weights


def second_eigenvalue(weights: NDArray[np.float64]) -> float:
    """Find |lambda_2|, the factor by which a round shrinks the distance to the mean.

    Parameters
    ----------
    weights : ndarray of float64, shape (n, n)
        A symmetric mixing matrix. Takes time of order n cubed.

    Returns
    -------
    float
        In [0, 1]: 0 if one round reaches consensus, 1 if no number of rounds does.

    Raises
    ------
    ValueError
        If the matrix is not symmetric or a row does not sum to 1.
    """
    if not np.array_equal(weights, weights.T):
        raise ValueError("the mixing matrix is not symmetric")
    if not np.allclose(weights.sum(axis=1), 1.0, rtol=0.0, atol=1e-9):
        raise ValueError("a row of the mixing matrix does not sum to 1")
    # Without the mean's own eigenvalue of 1, the greatest magnitude left is the second.
    deviation = weights - 1.0 / len(weights)
    return float(np.abs(np.linalg.eigvalsh(deviation)).max())


def spectral_gap(weights: NDArray[np.float64]) -> float:
    """Find 1 - |lambda_2|: about the inverse of the number of rounds that consensus takes.

    Examples
    --------
    >>> round(spectral_gap(metropolis_hastings(nx.cycle_graph(8))), 5)
    0.19526
    """
    return 1.0 - second_eigenvalue(weights)
