"""quickstart: federated averaging with PyTorch, three lines from decentralized."""
