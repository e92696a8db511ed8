"""quickstart: the data, the model, and how it is trained and tested."""

from functools import cache
from pathlib import Path

import torch
from datasets import Dataset
from flwr_datasets.partitioner import IidPartitioner
from torch import nn
from torch.nn import functional as F  # noqa: N812 - as everybody calls it
from torch.utils.data import DataLoader, Subset, random_split
from torchvision.datasets import CIFAR10, ImageFolder
from torchvision.transforms import Compose, Normalize, ToTensor

TRANSFORMS = Compose([ToTensor(), Normalize((0.5, 0.5, 0.5), (0.5, 0.5, 0.5))])


class Net(nn.Module):
    """A small convolutional network, after the PyTorch tutorial."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 6, 5)
        self.conv2 = nn.Conv2d(6, 16, 5)
        self.pool = nn.MaxPool2d(2, 2)
        self.fc1 = nn.Linear(16 * 5 * 5, 120)
        self.fc2 = nn.Linear(120, 84)
        self.fc3 = nn.Linear(84, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return one score per class."""
        x = self.pool(F.relu(self.conv1(x)))
        x = self.pool(F.relu(self.conv2(x))).flatten(start_dim=1)
        return self.fc3(F.relu(self.fc2(F.relu(self.fc1(x)))))


@cache
def load_cifar(data_dir: str, train: bool):
    """Read CIFAR-10 as torchvision keeps it, or from a folder of images."""
    folder = Path(data_dir)
    images = folder / ("train" if train else "test")
    if data_dir and images.is_dir():
        return ImageFolder(images, transform=TRANSFORMS)
    if data_dir and (folder / CIFAR10.base_folder).is_dir():
        return CIFAR10(folder, train=train, transform=TRANSFORMS)
    raise FileNotFoundError(
        f"data-dir={data_dir!r} holds neither {CIFAR10.base_folder} nor train/ and test/; set it "
        "with --run-config 'data-dir=\"/path/to/cifar\"'"
    )


def load_data(partition_id: int, num_partitions: int, batch_size: int, data_dir: str):
    """Load a node's share of the training images: four fifths to train on, the rest to test."""
    data = load_cifar(data_dir, train=True)
    partitioner = IidPartitioner(num_partitions)
    order = torch.randperm(len(data), generator=torch.Generator().manual_seed(0)).tolist()
    partitioner.dataset = Dataset.from_dict({"row": order})
    mine = Subset(data, partitioner.load_partition(partition_id)["row"])
    generator = torch.Generator().manual_seed(partition_id)
    train, test = random_split(mine, [0.8, 0.2], generator)
    return DataLoader(train, batch_size, shuffle=True), DataLoader(test, batch_size)


def load_test_data(data_dir: str) -> DataLoader:
    """Load the test images."""
    return DataLoader(load_cifar(data_dir, train=False), batch_size=128)


def train(net: nn.Module, loader: DataLoader, epochs: int, lr: float, device) -> float:
    """Train for some epochs and return the mean loss."""
    optimizer = torch.optim.SGD(net.parameters(), lr=lr, momentum=0.9)
    net.train()
    losses = []
    for _ in range(epochs):
        for images, labels in loader:
            optimizer.zero_grad()
            loss = F.cross_entropy(net(images.to(device)), labels.to(device))
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    return sum(losses) / max(len(losses), 1)


@torch.no_grad()
def test(net: nn.Module, loader: DataLoader, device) -> tuple[float, float]:
    """Return loss and accuracy."""
    net.eval()
    loss, correct = 0.0, 0
    for images, labels in loader:
        scores = net(images.to(device))
        loss += F.cross_entropy(scores, labels.to(device), reduction="sum").item()
        correct += (scores.argmax(1) == labels.to(device)).sum().item()
    return loss / len(loader.dataset), correct / len(loader.dataset)
