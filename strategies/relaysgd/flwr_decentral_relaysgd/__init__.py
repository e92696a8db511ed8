"""RelaySGD: nodes pass sums of models on along a tree, so that each reaches every node undiluted.

Paper
-----
Vogels, He, Koloskova, Lin, Karimireddy, Stich, Jaggi: *RelaySum for Decentralized Deep Learning on
Heterogeneous Data*, NeurIPS 2021, arXiv:2110.04175. The code compared with is epfml/relaysgd.

On a tree, with x_i the model of node i, u_i what training adds to it, and M_ij what node i tells
its neighbor j, a sum of c_ij contributions, a step of node i is

1. y_i = x_i + u_i                                           train
2. M_ij = y_i + sum over k != j of M_ki, of the step before   send, and c_ij = 1 + sum of c_ki
3. s_i = y_i + sum over k of M_ki, of this step               wait, and c_i = 1 + sum of c_ki
4. x_i = (s_i + (n - c_i) r_i) / n                           average

The model of each node is in s_i exactly once, as old as it is far away less one hop. What cannot
have arrived yet is filled up with a reference r_i, the initial model. This is RelaySum/Model, which
the paper calls RelaySGD. RelaySum/Grad sends u_i in place of y_i, and x_i <- x_i + s_i / n.

Overlapped, messages are used a step after they were sent, and everything is one step older.

Where a message is lost, the rule of ``missing`` applies. By default the last sum that came over
that edge is used again: a sum of states stays right when it is late. Every model still counts once,
and where all models stand still, the sum of all gradients is zero, as without any loss.

A sum also says how many nodes there are to speak of behind it, its *members*. A node that goes away
takes its edges with it; then sums get shorter by what was behind them and n becomes the number of
members that are left, one hop a step, without any agreement. What a node fills up with after the
first steps is its last average, so that none of this throws it back.

Where the tree is the spanning tree of a topology with cycles, it is planned anew when nodes or
links come and go: see :mod:`flwr_decentral_relaysgd.epochs`.

An average of late models is slower by kappa, see :mod:`flwr_decentral.core.trees`: the rates of the
paper's experiments are that much higher than those of centralized training.

Differences from the paper and its code
---------------------------------------
- ``missing="stale-fill"`` and ``mode="latest"`` are ours. The code leaves a lost sum out; its rules
  are the other values of ``missing``.
- The code fills up with the initial model (or, if told so, with the last average) for ever; here
  the initial model is for the steps that it is meant for, which are as many as there are hops.
- Membership, nodes that catch up, spanning trees with the best root, and new trees in the course
  of a run are ours.
- u is any number of local steps of any optimizer; with Adam this is the paper's Relay-Adam.
- The variant that mixes models and updates, which no table of the paper uses, is left out.
"""

from .algorithm import RelaySGD
from .machines import LatestMachine, RelayMachine

__all__ = ["LatestMachine", "RelayMachine", "RelaySGD"]
