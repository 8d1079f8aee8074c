"""The server: a robust rule in place of the mean, and its state in checkpoints. Start it again and it goes on."""

from __future__ import annotations

from flwr.app import ArrayRecord, Context, MetricRecord
from flwr.serverapp import Grid, ServerApp

from digits import task
from holdfast.integrations.flower import RobustStrategy, Rounds

app = ServerApp()


def combiner(run):
    """The rule's words or, where clients mask their updates, what combines the sums of buckets."""
    if not int(run["buckets"]):
        return str(run["aggregator"])
    from digits import masking

    return masking.buckets(run)


@app.main()
def main(grid: Grid, context: Context) -> None:
    run = context.run_config
    model = task.network(int(run["seed"]))

    def evaluate(server_round: int, arrays: ArrayRecord) -> MetricRecord:
        model.load_state_dict(arrays.to_torch_state_dict())
        return MetricRecord({"accuracy": task.accuracy(model)})

    strategy = RobustStrategy(
        combiner(run),
        f=int(run["f"]),
        rounds=Rounds(
            available_min=int(run["clients"]),
            deadline_s=float(run["deadline-s"]),
            late_s=float(run["late-s"]),
            seed=int(run["seed"]),
        ),
        checkpoints=str(run["checkpoints"]),
    )
    result = strategy.start(grid, ArrayRecord(model.state_dict()), num_rounds=int(run["rounds"]), evaluate_fn=evaluate)
    last = max(result.evaluate_metrics_serverapp)
    print(f"accuracy {result.evaluate_metrics_serverapp[last]['accuracy']:.3f} after round {last}", flush=True)
