"""quickstart: the ServerApp."""

import torch
from flwr.app import ArrayRecord, ConfigRecord, Context, MetricRecord
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg

from quickstart.task import Net, load_test_data, test

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    config = context.run_config
    torch.manual_seed(0)
    arrays = ArrayRecord(Net().state_dict())

    def evaluate(_: int, arrays: ArrayRecord) -> MetricRecord:
        return evaluate_globally(arrays, config["data-dir"])

    strategy = FedAvg(fraction_evaluate=1.0)
    result = strategy.start(
        grid=grid,
        initial_arrays=arrays,
        num_rounds=config["num-server-rounds"],
        train_config=ConfigRecord({"lr": config["learning-rate"]}),
        evaluate_fn=evaluate,
    )
    last = max(result.evaluate_metrics_serverapp)
    print("final accuracy:", result.evaluate_metrics_serverapp[last]["accuracy"])


def evaluate_globally(arrays: ArrayRecord, data_dir: str) -> MetricRecord:
    device = torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
    net = Net()
    net.load_state_dict(arrays.to_torch_state_dict())
    loss, accuracy = test(net.to(device), load_test_data(data_dir), device)
    return MetricRecord({"loss": loss, "accuracy": accuracy})
