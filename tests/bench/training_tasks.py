"""The two tasks that ``bench_training.py`` trains: models, data, and the steps of a local round."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import numpy as np
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import cross_entropy

NODES, BATCH, STEPS, RATE = 16, 8, 8, 0.05


def make_mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))


def make_lenet() -> nn.Module:
    def block(inputs: int, outputs: int) -> list[nn.Module]:
        convolution = nn.Conv2d(inputs, outputs, 5, padding=2)
        return [convolution, nn.GroupNorm(2, outputs), nn.ReLU(), nn.MaxPool2d(2)]

    layers = [*block(3, 32), *block(32, 32), *block(32, 64)]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(1024, 10))


@cache
def digits() -> tuple[np.ndarray, np.ndarray]:
    return load_digits(return_X_y=True)


@cache
def digits_of(node: int) -> tuple[torch.Tensor, torch.Tensor]:
    images, labels = digits()
    order = np.argsort(labels, kind="stable")
    shards = np.array_split(order, 2 * NODES)
    mine = np.concatenate([shards[node], shards[(node + NODES // 2) % NODES + NODES]])
    return torch.tensor(images[mine] / 16).float(), torch.tensor(labels[mine])


@cache
def noise_of(node: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(node)
    images = torch.randn(625, 3, 32, 32, generator=generator)
    return images, torch.randint(10, (625,), generator=generator)


@dataclass(frozen=True)
class Task:
    """What is trained on what, and for how long a measurement takes some seconds."""

    name: str
    make: Callable[[], nn.Module]
    data: Callable[[int], tuple[torch.Tensor, torch.Tensor]]
    rounds: int


TASKS = {
    "W1": Task("W1", make_mlp, digits_of, rounds=200),
    "W2": Task("W2", make_lenet, noise_of, rounds=10),
}


@cache
def network(task: Task) -> nn.Module:
    """Make the network that a process trains with, for all nodes that it trains."""
    return task.make()


def local_steps(task: Task, net: nn.Module, node: int) -> None:
    """Take the local steps of one round, as anybody would write them."""
    images, labels = task.data(node)
    optimizer = torch.optim.SGD(net.parameters(), lr=RATE)
    net.train()
    for _ in range(STEPS):
        batch = torch.randint(len(labels), (BATCH,))
        optimizer.zero_grad()
        cross_entropy(net(images[batch]), labels[batch]).backward()
        optimizer.step()
