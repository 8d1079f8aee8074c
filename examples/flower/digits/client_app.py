"""A client: it trains on its part of the data, and sends its model back.

Which part is the node's: `flower-supernode --node-config "partition-id=0 num-partitions=4"`. With `attack='sign-flip'`
beside that, the client is hostile (hostile.py), to see what the server makes of it.
"""

from __future__ import annotations

import torch
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

from digits import hostile, task
from holdfast.integrations.flower import ClientMomentum

app = ClientApp()


def averaged(message: Message, context: Context, call_next) -> Message:
    """Momentum over rounds, as much of it as the run's configuration says."""
    return ClientMomentum(float(context.run_config["momentum"]))(message, context, call_next)


def masked(message: Message, context: Context, call_next) -> Message:
    if not int(context.run_config["buckets"]):
        return call_next(message, context)
    from digits import masking

    mod = masking.mod(context.run_config, str(context.node_config.get("attack", "none")))
    return mod(message, context, call_next)


@app.train(mods=[masked, averaged])
def train(message: Message, context: Context) -> Message:
    node, run = context.node_config, context.run_config
    number, parts, seed = int(node["partition-id"]), int(node["num-partitions"]), int(run["seed"])
    server_round = int(message.content["config"]["server-round"])
    model = task.network(seed)
    model.load_state_dict(message.content["arrays"].to_torch_state_dict())
    x, y = task.part(number, parts, seed)
    # A function of the seed, the client and the round: whoever asks for this round again gets the same answer.
    generator = torch.Generator().manual_seed((seed * 1009 + server_round) * 1009 + number)
    loss = task.train(model, x, y, steps=int(run["local-steps"]), lr=float(run["learning-rate"]), generator=generator)
    arrays = ArrayRecord(model.state_dict())
    metrics = MetricRecord({"train-loss": loss, "num-examples": len(x)})
    honest = Message(RecordDict({"arrays": arrays, "metrics": metrics}), reply_to=message)
    return hostile.ATTACKS[str(node.get("attack", "none"))](message, honest)
