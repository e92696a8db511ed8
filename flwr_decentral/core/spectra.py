"""How fast pairwise exchanges spread over a topology: the constants chi_1 and chi_2.

Let edge (i, j) host exchanges at the rate lambda_ij, on average and per unit of time. The rates
make a Laplacian,

    L = sum over the edges of lambda_ij (e_i - e_j)(e_i - e_j)^T,

and two numbers follow from it:

    chi_1 = 1 / lambda_2(L)                                     the inverse algebraic connectivity
    chi_2 = max over the edges of (e_i - e_j)^T L^+ (e_i - e_j) / 2      the worst resistance.

chi_2 <= chi_1. Averaging over random edges forgets the distance to consensus at the rate
1 / chi_1; with a momentum it does so at about 1 / sqrt(chi_1 chi_2), which on a ring of n nodes is
0.29 n times as fast. Both numbers scale with the inverse of the rates. On a ring at rate 1,
chi_1 = 1 / (1 - cos(2 pi / n)) and chi_2 = (n - 1) / n.

See Nabli, Belilovsky, Oyallon, NeurIPS 2023, arXiv:2306.08289, and Even et al., NeurIPS 2021,
arXiv:2106.07644.
"""

from __future__ import annotations

import math
from typing import Final, NamedTuple

import networkx as nx
import numpy as np
from numpy.typing import NDArray

_CONNECTED_ABOVE: Final = 1e-9
"""The algebraic connectivity, relative to the largest rate, below which a graph falls apart."""


class Spectrum(NamedTuple):
    """How well a topology spreads pairwise exchanges at given rates.

    Attributes
    ----------
    chi_1 : float
        The inverse algebraic connectivity; infinite where the graph is not connected.
    chi_2 : float
        The greatest effective resistance of an edge, halved; infinite where there is no edge.
    """

    chi_1: float
    chi_2: float

    @property
    def connected(self) -> bool:
        """Tell whether exchanges reach consensus at all."""
        return math.isfinite(self.chi_1)

    @property
    def gain(self) -> float:
        """How many times faster a momentum makes the way to consensus: sqrt(chi_1 / chi_2)."""
        return math.sqrt(self.chi_1 / self.chi_2) if self.connected else 1.0

    @property
    def eta(self) -> float:
        """The rate at which model and momentum mix: 1 / (2 sqrt(chi_1 chi_2)), or 0."""
        return 0.5 / math.sqrt(self.chi_1 * self.chi_2) if self.connected else 0.0

    @property
    def alpha_tilde(self) -> float:
        """The momentum's step in an exchange: sqrt(chi_1 / chi_2) / 2. The model's is 1/2."""
        return 0.5 * self.gain


def exchange_rates(graph: nx.Graph[int], rate: float = 1.0) -> NDArray[np.float64]:
    """Find the rate of exchanges on each edge if every node picks its neighbors uniformly.

    A node starts ``rate / 2`` exchanges per unit of time, so edge (i, j) of nodes with the degrees
    d_i and d_j hosts rate (1/d_i + 1/d_j) / 2 of them. On a regular graph each node takes part in
    ``rate`` exchanges; in general it is the sum of its row.

    Parameters
    ----------
    graph : networkx.Graph
        A simple undirected graph on the nodes 0 to n-1.
    rate : float (default: 1.0)
        Exchanges per node and unit of time, on average over all nodes.

    Returns
    -------
    ndarray of float64, shape (n, n)
        The rates, symmetric, with a zero diagonal.

    Examples
    --------
    >>> exchange_rates(nx.path_graph(3)).sum(axis=1)
    array([0.75, 1.5 , 0.75])
    """
    rates = np.zeros((len(graph), len(graph)))
    degree = dict(graph.degree)
    for a, b in graph.edges:
        rates[a, b] = rates[b, a] = rate / 2 * (1 / degree[a] + 1 / degree[b])
    return rates


def spectrum(rates: NDArray[np.float64]) -> Spectrum:
    """Compute chi_1 and chi_2.

    Parameters
    ----------
    rates : ndarray of float64, shape (n, n)
        The rate of exchanges on each edge: symmetric, not negative, with a zero diagonal. Takes
        time of order n cubed.

    Raises
    ------
    ValueError
        If that is not what the rates are.

    Examples
    --------
    >>> chi = spectrum(exchange_rates(nx.cycle_graph(16)))
    >>> round(chi.chi_1, 4), round(chi.chi_2, 4), round(chi.eta, 4), round(chi.alpha_tilde, 4)
    (13.1371, 0.9375, 0.1425, 1.8717)
    """
    if not np.array_equal(rates, rates.T) or rates.diagonal().any() or (rates < 0).any():
        raise ValueError("rates must be symmetric, not negative, and zero on the diagonal")
    if not rates.any():
        return Spectrum(math.inf, math.inf)
    eigenvalues, vectors = np.linalg.eigh(np.diag(rates.sum(axis=1)) - rates)
    solid = eigenvalues > _CONNECTED_ABOVE * rates.max()
    scaled = vectors[:, solid] / np.sqrt(eigenvalues[solid])
    a, b = np.nonzero(np.triu(rates))
    chi_2 = float(np.square(scaled[a] - scaled[b]).sum(axis=1).max()) / 2
    chi_1 = 1 / float(eigenvalues[1]) if np.count_nonzero(~solid) == 1 else math.inf
    return Spectrum(chi_1, chi_2)
