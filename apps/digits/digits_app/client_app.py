"""digits: the ClientApp."""

from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from torch.optim import SGD

from digits_app.task import (
    DEVICE,
    Data,
    Net,
    get_momentum,
    load_data,
    load_test_data,
    set_momentum,
)
from digits_app.task import test as test_fn
from digits_app.task import train as train_fn
from flwr_decentral.flower import decentral_mod

app = ClientApp()


@app.train(mods=[decentral_mod])
def train(msg: Message, context: Context) -> Message:
    net = load_net(msg)
    config = msg.content["config"]
    optimizer = SGD(net.parameters(), lr=config["learning-rate"], momentum=config["momentum"])
    if "momentum" in context.state:
        set_momentum(net, optimizer, context.state["momentum"].to_torch_state_dict())

    data = load_node_data(context)
    steps, batch_size = context.run_config["local-steps"], context.run_config["batch-size"]
    loss = train_fn(net, optimizer, data, steps, batch_size)

    # The momentum stays on the node: what it shares with its neighbors is the model alone.
    if momentum := get_momentum(net, optimizer):
        context.state["momentum"] = ArrayRecord(momentum)
    metrics = MetricRecord({"num-examples": len(data[1]), "train-loss": loss})
    content = RecordDict({"arrays": ArrayRecord(net.state_dict()), "metrics": metrics})
    return Message(content, reply_to=msg)


@app.evaluate(mods=[decentral_mod])
def evaluate(msg: Message, context: Context) -> Message:  # noqa: ARG001 - Flower's signature
    data = load_test_data()
    loss, accuracy = test_fn(load_net(msg), data)
    metrics = MetricRecord({"num-examples": len(data[1]), "loss": loss, "accuracy": accuracy})
    return Message(RecordDict({"metrics": metrics}), reply_to=msg)


def load_net(msg: Message) -> Net:
    net = Net()
    net.load_state_dict(msg.content["arrays"].to_torch_state_dict())
    return net.to(DEVICE)


def load_node_data(context: Context) -> Data:
    node = context.node_config
    return load_data(node["partition-id"], node["num-partitions"], context.run_config)
