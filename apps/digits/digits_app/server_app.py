"""digits: the ServerApp, which starts the nodes, keeps the clock and never sees a model."""

import torch
from flwr.app import ArrayRecord, ConfigRecord, Context, MetricRecord
from flwr.serverapp import Grid, ServerApp

from digits_app.task import DEVICE, Net, load_test_data, test
from flwr_decentral.flower import decentral

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    config = context.run_config
    torch.manual_seed(config["seed"])

    strategy = decentral(config["algorithm"], run_config=config)
    strategy.start(
        grid=grid,
        initial_arrays=ArrayRecord(Net().state_dict()),
        num_rounds=config["num-server-rounds"],
        train_config=ConfigRecord({key: config[key] for key in ("learning-rate", "momentum")}),
        evaluate_fn=evaluate_averaged_model,
    )


def evaluate_averaged_model(server_round: int, arrays: ArrayRecord) -> MetricRecord:  # noqa: ARG001
    net = Net()
    net.load_state_dict(arrays.to_torch_state_dict())
    loss, accuracy = test(net.to(DEVICE), load_test_data())
    return MetricRecord({"loss": loss, "accuracy": accuracy})
