"""dice: the ServerApp."""

import numpy as np
from flwr.app import Array, ArrayRecord, Context
from flwr.serverapp import Grid, ServerApp

from flwr_decentral.flower import decentral

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    config = context.run_config
    strategy = decentral(config["algorithm"], run_config=config)
    strategy.start(
        grid=grid,
        initial_arrays=ArrayRecord({"w": Array(np.zeros(1000, np.float32))}),
        num_rounds=config["num-server-rounds"],
    )
