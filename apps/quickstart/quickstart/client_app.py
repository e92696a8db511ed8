"""quickstart: the ClientApp."""

import torch
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

from quickstart.task import Net, load_data
from quickstart.task import test as test_fn
from quickstart.task import train as train_fn

app = ClientApp()


@app.train()
def train(msg: Message, context: Context) -> Message:
    net, device = load_net(msg)
    loader, _ = load_node_data(context)
    epochs = context.run_config["local-epochs"]
    loss = train_fn(net, loader, epochs, msg.content["config"]["lr"], device)
    metrics = MetricRecord({"train-loss": loss, "num-examples": len(loader.dataset)})
    content = RecordDict({"arrays": ArrayRecord(net.state_dict()), "metrics": metrics})
    return Message(content, reply_to=msg)


@app.evaluate()
def evaluate(msg: Message, context: Context) -> Message:
    net, device = load_net(msg)
    _, loader = load_node_data(context)
    loss, accuracy = test_fn(net, loader, device)
    metrics = {"loss": loss, "accuracy": accuracy, "num-examples": len(loader.dataset)}
    return Message(RecordDict({"metrics": MetricRecord(metrics)}), reply_to=msg)


def load_net(msg: Message) -> tuple[Net, torch.device]:
    device = torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
    net = Net()
    net.load_state_dict(msg.content["arrays"].to_torch_state_dict())
    return net.to(device), device


def load_node_data(context: Context):
    node, config = context.node_config, context.run_config
    return load_data(
        node["partition-id"], node["num-partitions"], config["batch-size"], config["data-dir"]
    )
