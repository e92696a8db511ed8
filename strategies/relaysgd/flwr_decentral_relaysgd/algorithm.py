"""The hyper-parameters, and what they ask of a topology."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import ClassVar, Final, Literal

import networkx as nx

from flwr_decentral.core import (
    Algorithm,
    Capabilities,
    ConfigurationError,
    Interleaved,
    Layout,
    Machine,
    Site,
    Tree,
    Wire,
    check_wire,
    suggest,
)
from flwr_decentral.core.trees import double_binary_trees, spanning_tree

from .machines import LatestMachine, RelayMachine
from .relay import Relay

_CHOICES: Final = {
    "variant": ("model", "grad"),
    "tree": ("given", "spanning", "double-binary"),
    "mode": ("lockstep", "overlapped", "latest"),
    "missing": ("stale-fill", "last-average", "counts", "initial", "own"),
    "rate_scale": ("none", "kappa"),
}
_MANY_NEIGHBORS: Final = 8


@dataclass(frozen=True, kw_only=True)
class RelaySGD(Algorithm):
    """Pass sums on along a tree.

    Parameters
    ----------
    variant : {"model", "grad"}
        Relay models (RelaySum/Model, the paper's RelaySGD), or updates (RelaySum/Grad), which must
        not be lost: what a node missed, it misses for ever.
    tree : {"given", "spanning", "double-binary"}
        The topology is the tree; or the tree of shortest paths that has the least mean distance is
        chosen from any connected topology, and, if that has cycles and models are relayed, again
        whenever nodes or links come and go; or the even coordinates are relayed along the binary
        tree and the odd ones along its mirror image, for topologies that have both, so that no
        node sends more than two models a step.
    mode : {"lockstep", "overlapped", "latest"}
        Wait for this step's sums after training; use the sums of the step before, which are on the
        way during training; or never wait, and use the newest sum of each neighbor.
    missing : {"stale-fill", "last-average", "counts", "initial", "own"}
        What stands in for sums that did not come: the last one of the same edge; or nothing, and
        the node's last average, a smaller n, the initial model or its own trained model fills the
        place. Only the first is unbiased under loss. Without effect on updates, of which a missing
        one is zero.
    rate_scale : {"none", "kappa"}
        Multiply what training adds by kappa of the tree, which makes a learning rate mean what it
        means in centralized training. By default the user's learning rate is left alone.
    patience : float (default: 600.0)
        How long, in seconds, a node that has finished its own training waits for a neighbor.
    wire : {"float32", "bfloat16", "float16", "int8"}
        The form in which sums travel. Each hop rounds anew.

    Examples
    --------
    >>> from flwr_decentral.core.topology import build
    >>> RelaySGD(tree="spanning").trees(build("ring", nodes=5))[0].diameter
    4
    """

    name: ClassVar[str] = "relaysgd"
    paper: ClassVar[str] = "Vogels et al., NeurIPS 2021, arXiv:2110.04175"
    capabilities: ClassVar[Capabilities] = Capabilities(synchronous=True, needs_tree=True)
    default_topology: ClassVar[str] = "binary-tree"

    variant: Literal["model", "grad"] = "model"
    tree: Literal["given", "spanning", "double-binary"] = "given"
    mode: Literal["lockstep", "overlapped", "latest"] = "lockstep"
    missing: Literal["stale-fill", "last-average", "counts", "initial", "own"] = "stale-fill"
    rate_scale: Literal["none", "kappa"] = "none"
    patience: float = 600.0
    wire: Wire = "float32"

    def __post_init__(self) -> None:
        check_wire(self.wire)
        for field, choices in _CHOICES.items():
            value = getattr(self, field)
            if value not in choices:
                raise ConfigurationError(
                    f"relaysgd has no {field} {value!r}; {suggest(str(value), choices)}"
                )
        if not 0 <= self.patience < math.inf:
            raise ConfigurationError(
                f"patience must be a finite number of seconds, zero or more, got {self.patience}"
            )
        for problem in self._contradictions():
            raise ConfigurationError(problem)
        # These depend on hyper-parameters; the class shows those of the defaults.
        needs = replace(
            type(self).capabilities,
            synchronous=self.mode != "latest",
            needs_tree=self.tree != "spanning",
        )
        object.__setattr__(self, "capabilities", needs)
        if self.tree == "double-binary":
            object.__setattr__(self, "default_topology", "double-binary-trees")

    def _contradictions(self) -> Iterator[str]:
        stale = self.missing == "stale-fill"
        if self.variant == "grad" and self.rate_scale == "kappa":
            yield (
                "variant='grad' adds every update in full, so that kappa would be too much; "
                "leave rate_scale at 'none'"
            )
        if self.variant == "grad" and not stale:
            yield (
                f"missing={self.missing!r} is about models; with variant='grad' a missing update "
                "is zero. Leave it out, or relay models"
            )
        if self.mode == "latest" and self.variant == "grad":
            yield (
                "mode='latest' uses a sum more than once or not at all, and an update must count "
                "once; use variant='model', or mode='lockstep'"
            )
        if self.mode == "latest" and not stale:
            yield (
                f"mode='latest' always uses the newest sum of each neighbor, so "
                f"missing={self.missing!r} has no meaning; leave it out"
            )

    def trees(self, topology: nx.Graph[int]) -> tuple[Tree, ...]:
        """Choose what to relay along, the same for every node.

        Parameters
        ----------
        topology : networkx.Graph
            Who may talk to whom.

        Returns
        -------
        tuple of Tree
            One tree; or two, for the even and the odd coordinates.

        Raises
        ------
        ConfigurationError
            If the topology has no such tree.
        """
        return _trees(topology, self.tree)

    def kappa(self, topology: nx.Graph[int]) -> float:
        """Compute by how much averages are slower than the models that they are of."""
        if self.variant == "grad":
            return 1.0
        # Without waiting, at an equal pace, sums are used in the step after the one they are of.
        return self.trees(topology)[0].kappa(overlap=self.mode != "lockstep")

    def check(self, topology: nx.Graph[int], layout: Layout) -> tuple[str, ...]:
        """Refuse a topology without the tree; warn of what the tree means for rates and traffic."""
        trees = self.trees(topology)
        if layout.size < len(trees):
            raise ConfigurationError(
                "two trees share the coordinates of a model, and this one has "
                f"{layout.size}; use tree='spanning'"
            )
        warnings = []
        links = topology.number_of_edges()
        if self.tree == "spanning" and links >= len(topology):
            warnings.append(
                f"sums are relayed along {len(topology) - 1} of {links} links, the shortest paths "
                f"from node {trees[0].root}; {trees[0].diameter} hops at most"
            )
        if trees[0].degree > _MANY_NEIGHBORS:
            warnings.append(
                f"some node sends {trees[0].degree} models a step; tree='double-binary' on "
                "topology='double-binary-trees' sends two at most"
            )
        kappa = self.kappa(topology)
        if kappa > 1 and self.rate_scale == "none":
            warnings.append(
                f"models arrive late, which slows their average down by kappa = {kappa:.4g}: "
                "multiply the learning rate by it to compare with centralized training, or set "
                "rate_scale='kappa'"
            )
        return tuple(warnings)

    def machine(self, site: Site) -> Machine:
        """Make the machine of one node."""
        partition = Interleaved(site.layout.size, 2) if self.tree == "double-binary" else None
        relay = Relay(
            site=site,
            trees=self.trees(site.topology),
            partition=partition,
            missing=self.missing if self.variant == "model" else "zero",
            # Without waiting, at an equal pace, sums are used in the step after theirs.
            overlap=self.mode != "lockstep",
            scaled=self.rate_scale == "kappa",
            wire=self.wire,
        )
        # An update must count once, so that none may be told again along another tree.
        cyclic = site.topology.number_of_edges() >= site.size
        replans = self.tree == "spanning" and self.variant == "model" and cyclic
        if self.mode == "latest":
            return LatestMachine(site, relay, replans=replans)
        return RelayMachine(
            site,
            relay,
            replans=replans,
            overlap=self.mode == "overlapped",
            patience=self.patience,
        )


@lru_cache(maxsize=8)
def _trees(topology: nx.Graph[int], kind: str) -> tuple[Tree, ...]:
    # Cached by the identity of the frozen graph: all nodes of a process share the trees.
    if kind == "spanning":
        return (spanning_tree(topology),)
    if kind == "double-binary":
        trees = double_binary_trees(len(topology))
        lacking = sorted(
            {(min(e), max(e)) for tree in trees for e in tree.edges if not topology.has_edge(*e)}
        )
        if lacking:
            more = f" and {len(lacking) - 3} more" if len(lacking) > 3 else ""
            raise ConfigurationError(
                f"the topology lacks the links {', '.join(map(str, lacking[:3]))}{more} of the "
                "double binary trees; use topology='double-binary-trees' or 'complete', or "
                "tree='spanning'"
            )
        return trees
    try:
        return (Tree.of(topology),)
    except ConfigurationError as error:
        raise ConfigurationError(
            f"relaysgd relays sums along a tree, but {error.args[0]}. Use a topology that is one "
            "(chain, star, binary-tree), or tree='spanning', which chooses one from any connected "
            "topology"
        ) from error
