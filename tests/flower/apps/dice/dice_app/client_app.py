"""dice: the ClientApp, which draws from every global generator and may misbehave."""

import os
import random
import signal
import time
import zlib
from pathlib import Path

import numpy as np
from flwr.app import Array, ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

from flwr_decentral.flower import decentral_mod

app = ClientApp()


@app.train(mods=[decentral_mod])
def train(msg: Message, context: Context) -> Message:
    import torch  # here, so that each process imports it while it trains

    config = context.run_config
    if config["fail"]:
        raise ValueError("told to fail")
    noise = torch.rand(1000).numpy() + np.random.rand(1000) + random.random()  # noqa: NPY002
    rolls = context.state["rolls"]["total"] if "rolls" in context.state else 0.0
    context.state["rolls"] = MetricRecord({"total": rolls + float(noise[0])})
    if config["marks"]:
        leave_marks(Path(config["marks"]), config["die"])
    time.sleep(config["seconds"])

    model = msg.content["arrays"]["w"].numpy() + noise.astype(np.float32)
    content = {"arrays": ArrayRecord({"w": Array(model)}), "m": MetricRecord({"num-examples": 1})}
    return Message(RecordDict(content), reply_to=msg)


@app.evaluate(mods=[decentral_mod])
def evaluate(msg: Message, context: Context) -> Message:
    # The model, to the byte, and the state as numbers that end up in the results.
    model = msg.content["arrays"]["w"].numpy()
    checksum, mean = zlib.crc32(model.tobytes()), float(model.mean())
    rolls = float(context.state["rolls"]["total"])
    metrics = MetricRecord({"num-examples": 1, "checksum": checksum, "mean": mean, "rolls": rolls})
    return Message(RecordDict({"m": metrics}), reply_to=msg)


def leave_marks(folder: Path, die: bool) -> None:
    mark = folder / f"process-{os.getpid()}"
    trained_before = mark.exists()
    mark.touch()
    if die and trained_before:
        try:
            (folder / "dead").touch(exist_ok=False)
        except FileExistsError:
            return
        os.kill(os.getpid(), signal.SIGKILL)
