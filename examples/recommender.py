"""Clicks: which user clicks on which item, learned with embedding tables and a small dense net, on data made here.

    python examples/recommender.py                                        # alone: the rows are in this process
    holdfast run --workers 2 --servers 2 examples/recommender.py          # rows on servers, the dense part exact
    holdfast run --workers 2 --servers 2 examples/recommender.py --staleness 4    # the dense part on servers, too
    python examples/recommender.py --publish /tmp/clicks                  # and a log that others follow
    python examples/recommender.py --look-up /tmp/clicks/users            # another process: look-ups from that log

Users and items have ids of 64 bits, as a hash of anything gives them, and most of them come seldom. A row is made when
its id has been seen twice. Reaches an AUC of 0.77 and more on impressions that it was not shown; 0.5 is guessing.
"""

import argparse
import time

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import holdfast
from holdfast import tables

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--steps", type=int, default=600)
parser.add_argument("--batch-size", type=int, default=512, help="impressions in a step, over all workers")
parser.add_argument("--shards", type=int, default=8, help="parts of a batch; at least as many as workers")
parser.add_argument("--samples", type=int, default=120_000)
parser.add_argument("--dim", type=int, default=8)
parser.add_argument("--seed", type=int, default=0)
parser.add_argument("--frozen", action="store_true", help="train the dense part only: it is exact then, bit for bit")
parser.add_argument("--staleness", type=int, help="train the dense part asynchronously: so many steps apart at most")
parser.add_argument("--publish", metavar="URI", help="write the tables there, for others to follow")
parser.add_argument("--look-up", metavar="URI", help="train nothing: look some users up in the log that is there")
parser.add_argument("--slow", type=float, default=0.0, metavar="S", help="extra seconds of sleep per shard")
args = parser.parse_args()

if args.look_up:
    follower = tables.follow(args.look_up, staleness_s=7 * 86_400)
    users = torch.tensor([3, 5, 8])
    print(f"rows of {users.tolist()}, {follower.staleness_s:.0f} s old, after {sum(follower.updates)} updates:")
    print(follower.look_up(users))
    follower.close()
    raise SystemExit(0)

# The data: a user clicks where tastes agree. Few users and items are common, and most are rare.
draws = torch.Generator().manual_seed(args.seed)


def drawn(count: int, common: float) -> torch.Tensor:
    """Numbers up to `count`, small ones often."""
    return (count * torch.rand(args.samples, generator=draws) ** common).long()


user_number, item_number = drawn(2_000, 2.0), drawn(500, 2.0)
taste_of_user = torch.randn(2_000, 3, generator=draws)
taste_of_item = torch.randn(500, 3, generator=draws)
agreement = (taste_of_user[user_number] * taste_of_item[item_number]).sum(dim=1)
click = (torch.rand(args.samples, generator=draws) < torch.sigmoid(1.2 * agreement - 0.5)).float()
spread = 0x9E3779B97F4A7C15 - 2**64  # odd, so that no two numbers get the same id
user, item = user_number * spread, item_number * spread + 1
test = torch.arange(args.samples) % 10 == 0
dataset = TensorDataset(user[~test], item[~test], click[~test])


class Clicks(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        ends = tables.Expire(updates=100_000)
        first, how = tables.Normal(0.1), tables.Adagrad(lr=0.1)
        self.users = holdfast.EmbeddingTable(dim, optimizer=how, admit=2, expire=ends, first=first, seed=1)
        self.items = holdfast.EmbeddingTable(dim, optimizer=how, admit=2, expire=ends, first=first, seed=2)
        self.dense = nn.Sequential(nn.Linear(3 * dim, 32), nn.ReLU(), nn.Linear(32, 1))

    def forward(self, user: torch.Tensor, item: torch.Tensor) -> torch.Tensor:
        u, i = self.users(user), self.items(item)
        return (self.dense(torch.cat([u, i, u * i], dim=1)).squeeze(1)) + (u * i).sum(dim=1)


torch.manual_seed(args.seed)
model = Clicks(args.dim)
if args.frozen:
    model.users.requires_grad_(False)
    model.items.requires_grad_(False)
optimizer = torch.optim.AdamW(model.dense.parameters(), lr=3e-3)

run = holdfast.join(
    model,
    optimizer,
    dataset,
    batch_size=args.batch_size,
    shards=args.shards,
    seed=args.seed,
    drop_last=True,
    mode=holdfast.Exact() if args.staleness is None else holdfast.Async(staleness=args.staleness),
)
logs = []
if args.publish:
    logs = [
        tables.publish(table, f"{args.publish}/{name}") for name, table in model.named_children() if name != "dense"
    ]
for log in logs:
    log.restore()  # what an earlier training has left there
for step in run.steps(args.steps):
    for user_shard, item_shard, click_shard in step:
        loss = F.binary_cross_entropy_with_logits(model(user_shard, item_shard), click_shard)
        loss.backward()
        step.record(loss=loss)
        time.sleep(args.slow)
    optimizer.step()
    model.users.step()
    model.items.step()
    if run.leader and run.step % 100 == 0:
        for log in logs:
            log.write()

if run.leader:
    for log in logs:
        log.write()
    with torch.no_grad():
        score = model(user[test], item[test])
    order = score.argsort().argsort().double() + 1
    yes = click[test].bool()
    auc = (order[yes].sum() - yes.sum() * (yes.sum() + 1) / 2) / (yes.sum() * (~yes).sum())
    print(f"after {args.steps} steps: AUC {auc.item():.3f} on {int(test.sum())} impressions")
