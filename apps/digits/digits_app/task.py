"""digits: the data, the model, and what a node does with them."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from functools import cache
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, relu
from torch.optim import SGD

if TYPE_CHECKING:
    from flwr_datasets.partitioner import Partitioner

# Flower Datasets sorts in a way that pyarrow has deprecated.
warnings.filterwarnings("ignore", "Specifying null_placement", FutureWarning)

# A model this small gains nothing from more threads, and their number decides the last bits.
torch.set_num_threads(1)

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")

Data = tuple[Tensor, Tensor]  # images, shape (examples, 64), and labels


class Net(nn.Module):
    """A multilayer perceptron 64-32-10 with 2,410 parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden = nn.Linear(64, 32)
        self.output = nn.Linear(32, 10)

    def forward(self, images: Tensor) -> Tensor:
        """Return one score per class."""
        return self.output(relu(self.hidden(images)))


def load_data(partition_id: int, num_partitions: int, run_config: Mapping) -> Data:
    """Load a node's training data."""
    return _load_partition(
        partition_id,
        num_partitions,
        str(run_config["partitioner"]),
        int(run_config["shards-per-node"]),
        float(run_config["alpha"]),
        int(run_config["seed"]),
    )


def load_test_data() -> Data:
    """Load the 360 test images, which are the same for all nodes."""
    return _load_digits()[1]


def train(net: Net, optimizer: SGD, data: Data, steps: int, batch_size: int) -> float:
    """Take steps on random batches, none if there is no data, and return the mean loss."""
    images, labels = data
    if not len(labels):
        return 0.0
    net.train()
    total = 0.0
    for _ in range(steps):
        # torch's global generator: decentral_mod seeds it for each node and round.
        batch = torch.randint(len(labels), (batch_size,)).to(DEVICE)
        loss = cross_entropy(net(images[batch]), labels[batch])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        total += loss.item()
    return total / steps


@torch.no_grad()
def test(net: Net, data: Data) -> tuple[float, float]:
    """Return loss and accuracy."""
    images, labels = data
    net.eval()
    scores = net(images)
    accuracy = (scores.argmax(dim=1) == labels).float().mean()
    return cross_entropy(scores, labels).item(), accuracy.item()


def get_momentum(net: Net, optimizer: SGD) -> dict[str, Tensor]:
    """Return the momentum buffers, by the names of the parameters they belong to."""
    return {
        name: optimizer.state[parameter]["momentum_buffer"]
        for name, parameter in net.named_parameters()
        if optimizer.state[parameter].get("momentum_buffer") is not None
    }


def set_momentum(net: Net, optimizer: SGD, buffers: Mapping[str, Tensor]) -> None:
    """Set the momentum buffers that :func:`get_momentum` returned."""
    for name, parameter in net.named_parameters():
        optimizer.state[parameter]["momentum_buffer"] = buffers[name].to(DEVICE)


# Cached: a process serves many nodes, and a node is served by many processes. In a deployment there
# is a process for each message, most of which need no data: Flower Datasets and scikit-learn, which
# take longer to import than all the rest, are imported where they are used.


@cache
def _load_digits() -> tuple[Data, Data]:
    from sklearn.datasets import load_digits
    from sklearn.model_selection import train_test_split

    images, labels = load_digits(return_X_y=True)
    split = train_test_split(images / 16, labels, test_size=360, random_state=0, stratify=labels)
    train_images, test_images = (torch.tensor(part).float().to(DEVICE) for part in split[:2])
    train_labels, test_labels = (torch.tensor(part).to(DEVICE) for part in split[2:])
    return (train_images, train_labels), (test_images, test_labels)


@cache
def _load_partition(
    partition_id: int, num_partitions: int, kind: str, shards: int, alpha: float, seed: int
) -> Data:
    images, labels = _load_digits()[0]
    partitioner = _make_partitioner(num_partitions, kind, shards, alpha, seed)
    rows = torch.tensor(partitioner.load_partition(partition_id)["row"], dtype=torch.long)
    return images[rows], labels[rows]


@cache
def _make_partitioner(
    num_partitions: int, kind: str, shards: int, alpha: float, seed: int
) -> Partitioner:
    from datasets import Dataset
    from flwr_datasets.partitioner import (
        DirichletPartitioner,
        IidPartitioner,
        ShardPartitioner,
    )

    labels = _load_digits()[0][1].tolist()
    if kind == "shards":
        if not 1 <= num_partitions * shards <= len(labels):
            raise ValueError(
                f"shards-per-node: {num_partitions} nodes with {shards} shards each need "
                f"{num_partitions * shards} images, but there are {len(labels)}"
            )
        partitioner = ShardPartitioner(
            num_partitions, partition_by="label", num_shards_per_partition=shards, seed=seed
        )
    elif kind == "dirichlet":
        # Nodes may remain without data, rather than the draw be repeated until none does.
        partitioner = DirichletPartitioner(
            num_partitions, partition_by="label", alpha=alpha, min_partition_size=0, seed=seed
        )
    elif kind == "iid":
        partitioner = IidPartitioner(num_partitions)
    else:
        raise ValueError(f"partitioner: expected shards, dirichlet or iid, got {kind!r}")
    partitioner.dataset = Dataset.from_dict({"row": range(len(labels)), "label": labels})
    return partitioner
