"""Shapes of data and loops: samplers, loaders, extras, what a script does besides."""

from __future__ import annotations

from shape import Shape, exact, not_promised, refused

HISTORY = """
class History:
    def __init__(self):
        {start}

    def state_dict(self):
        return {state}

    def load_state_dict(self, state):
        {load}

history = History()
extras["history"] = history
"""
BY_HISTORY = """
{change}
optimizer.param_groups[0]["lr"] = 1e-3 * (1 + {value})
optimizer.step()
"""


def history(start: str, state: str, load: str) -> str:
    """An extra of the script's own."""
    return HISTORY.format(start=start, state=state, load=load)


def by_history(change: str, value: str) -> str:
    """The extra changes with every step and decides the learning rate, so that its order is in the weights."""
    return BY_HISTORY.format(change=change, value=value)


def rows(name: str, loaders: int) -> Shape:
    return exact(
        name,
        f"batches that begin at odd places in memory, `num_workers={loaders}`",
        data="""
        class Rows:
            def __init__(self):
                self.rows = np.random.RandomState(1).randn(96, 101).astype(np.float32)
                self.rows[:, 0] = np.arange(96) % 3

            def __len__(self):
                return 96

            def __getitem__(self, index):
                return self.rows[index]

        def collate(samples):
            together = np.stack(samples)
            return torch.from_numpy(together[:, 1:]), torch.from_numpy(together[:, 0]).long()

        dataset = Rows()
    """,
        options=f'options = {{"batch_size": 12, "shards": 6, "collate_fn": collate, "num_workers": {loaders}}}',
        model="model = nn.Sequential(nn.Linear(100, 16), nn.ReLU(), nn.Linear(16, 3))",
    )


AUGMENTED = """
class Augmented:
    def __len__(self):
        return 96

    def __getitem__(self, index):
        noise = 0.1 * torch.randn(10) + float(np.random.randn()) + random.random()
        return x_all[index] + noise, y_all[index]

x_all, y_all = x, y
dataset = Augmented()
"""
RAGGED = """
class Ragged:
    def __len__(self):
        return 96

    def __getitem__(self, index):
        return torch.ones(1 + index % 7, 10) * x_all[index], y_all[index]

def padded(samples):
    return nn.utils.rnn.pad_sequence([s[0] for s in samples], batch_first=True), torch.stack([s[1] for s in samples])

x_all, y_all = x, y
dataset = Ragged()
"""
ONCE = """
for step in run.steps({steps}):
    for x, y in step:
        loss = F.cross_entropy(model(x), y)
        loss.backward()
    optimizer.step()
"""

DATA = [
    rows("odd-offsets", 0),
    rows("odd-offsets-loaders", 2),
    exact(
        "augmented",
        "augmentation that draws from torch, NumPy and `random`, `num_workers=2`",
        data=AUGMENTED,
        options='options = {"batch_size": 24, "shards": 6, "num_workers": 2}',
    ),
    exact(
        "ragged",
        "samples of several lengths, padded by a `collate_fn`",
        data=RAGGED,
        options='options = {"batch_size": 24, "shards": 6, "collate_fn": padded}',
        shard="""
            x, y = batch
            loss = F.cross_entropy(model(x).sum(1), y)
            loss.backward()
        """,
    ),
    exact(
        "string-order",
        "sets of strings (`PYTHONHASHSEED=0` when alone)",
        shard="""
        x, y = batch
        weight = 0.0
        for word in {f"name{int(value)}" for value in (100 * x[:, 0]).long()}:
            weight = 0.7 * weight + len(word) + int(word[4:]) % 13
        loss = F.cross_entropy(model(x), y) * (1 + weight / 100)
        loss.backward()
    """,
    ),
    exact(
        "weighted-sampler",
        "a `WeightedRandomSampler`",
        options="""
        sampler = torch.utils.data.WeightedRandomSampler(torch.linspace(1, 3, 96), 96)
        options = {"batch_size": 24, "shards": 6, "sampler": sampler}
    """,
    ),
    exact(
        "batch-sampler",
        "a `batch_sampler`",
        options="""
        batches = torch.utils.data.BatchSampler(torch.utils.data.RandomSampler(range(96)), 24, drop_last=True)
        options = {"shards": 6, "batch_sampler": batches}
    """,
    ),
    exact(
        "odd-shards",
        "7 shards, 91 samples, a last batch that is filled up",
        data="dataset = torch.utils.data.TensorDataset(x[:91], y[:91])",
        options='options = {"batch_size": 21, "shards": 7, "drop_last": False}',
    ),
    exact(
        "fewer-shards-than-workers",
        "2 shards, in their order: most workers have none",
        options='options = {"batch_size": 8, "shards": 2, "shuffle": False}',
    ),
    exact(
        "stream",
        "a `holdfast.data.Stream` over files of lines",
        data="""
        import json, tempfile

        home = tempfile.TemporaryDirectory()
        with open(f"{home.name}/a.jsonl", "w") as file:
            file.writelines(json.dumps([row.tolist(), int(label)]) + "\\n" for row, label in zip(x[:60], y[:60]))
        with open(f"{home.name}/b.jsonl", "w") as file:
            file.writelines(json.dumps([row.tolist(), int(label)]) + "\\n" for row, label in zip(x[60:], y[60:]))

        def decode(line):
            row, label = json.loads(line)
            return torch.tensor(row), torch.tensor(label)

        dataset = holdfast.data.Stream(f"{home.name}/*.jsonl", decode=decode, shuffle_buffer=32, block=4)
    """,
    ),
    exact(
        "iterable-dataset",
        "an iterable dataset, shuffled with Python's generator",
        data="""
        import random

        rows, labels = x, y  # the loop below has another x and y

        class Shuffled(torch.utils.data.IterableDataset):
            def __iter__(self):
                for number in random.sample(range(len(rows)), len(rows)):
                    yield rows[number], labels[number]

        dataset = Shuffled()
    """,
    ),
    exact(
        "iterable-with-a-position",
        "an iterable of whole batches of several sizes, with `state_dict` and `load_state_dict`",
        data="""
        rows, labels = x, y  # the loop below has another x and y

        class Batches:
            at = 0

            def __iter__(self):
                while self.at < 80:
                    start, self.at = self.at, self.at + 16 + self.at % 5
                    yield rows[start : self.at], labels[start : self.at]
                self.at = 0

            def state_dict(self):
                return {"at": self.at}

            def load_state_dict(self, state):
                self.at = state["at"]

        dataset = Batches()
    """,
        options='options = {"shards": 8}',
    ),
    refused(
        "data-loader",
        "a `DataLoader` in place of the dataset",
        "the dataset is a DataLoader, and join makes the batches itself",
        data="""
        dataset = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, y), batch_size=24)
    """,
    ),
]

EXTRAS = [
    exact(
        "extra-dict-order",
        "an extra that goes by the order of its dict",
        extras=history("self.values = {}", '{"values": dict(self.values)}', 'self.values = dict(state["values"])'),
        apply=by_history(
            """
name = f"k{step.number * 7 % 31:02}"
history.values.pop(name, None)
history.values[name] = step.metrics["loss"]
total = 0.0
for value in history.values.values():
    total = 0.9 * total + value
""",
            "total",
        ),
    ),
    exact(
        "extra-ordered-dict",
        "extras with OrderedDict and defaultdict",
        imports="from collections import OrderedDict, defaultdict",
        extras=history(
            "self.named, self.counts = OrderedDict(), defaultdict(float)",
            '{"named": self.named, "counts": self.counts}',
            'self.named, self.counts = state["named"], state["counts"]',
        ),
        apply=by_history(
            """
name = str(step.number % 7)
history.named[name] = step.metrics["loss"]
history.named.move_to_end(name)
history.counts[step.number % 11] += step.metrics["loss"]
""",
            "next(iter(history.named.values()))",
        ),
    ),
    exact(
        "extra-list",
        "an extra whose `state_dict` is a list",
        extras=history("self.value = 0.0", "[self.value]", "self.value = state[0]"),
        apply=by_history('history.value = 0.9 * history.value + step.metrics["loss"]', "history.value"),
    ),
    refused(
        "extra-masked-array",
        "a masked array in an extra",
        "extras['history']['state']['m'] is a numpy MaskedArray, which cannot travel in a snapshot",
        extras=history(
            "self.m = np.ma.masked_array(np.arange(1.0, 6.0), mask=[0, 1, 0, 1, 0])",
            '{"m": self.m}',
            'self.m = state["m"]',
        ),
    ),
    refused(
        "extra-late-set",
        "a set that comes into an extra in mid-run",
        "['history']['n'] is a set, which cannot travel in a snapshot",
        extras=history("self.n = 0", '{"n": {1} if self.n > 4 else None}', "pass"),
        apply=by_history("history.n += 1", "0"),
    ),
    refused(
        "extra-does-not-load",
        "an extra that does not take back its own state",
        "the extra history does not take back what its own state_dict returned: TypeError",
        extras=history("self.n = 0", "[self.n]", 'self.n = state["n"]'),
    ),
]

LOOPS = [
    exact(
        "clipping",
        "gradient clipping, by norm and by value",
        apply="""
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        nn.utils.clip_grad_value_(model.parameters(), 0.01)
        optimizer.step()
    """,
    ),
    exact(
        "accumulation",
        "gradients that are added up over several steps, in an extra",
        extras="""
        class Sums:
            def __init__(self):
                self.sums = [torch.zeros_like(p) for p in model.parameters()]

            def state_dict(self):
                return {"sums": self.sums}

            def load_state_dict(self, state):
                self.sums = state["sums"]

        kept = Sums()
        extras["sums"] = kept
    """,
        apply="""
        for p, total in zip(model.parameters(), kept.sums):
            total.add_(p.grad)
        if step.number % 4 == 3:
            for p, total in zip(model.parameters(), kept.sums):
                p.grad = total.clone()
                total.zero_()
            optimizer.step()
    """,
    ),
    exact(
        "noise-on-gradients",
        "noise that is drawn after the shards",
        apply="""
        for p in model.parameters():
            p.grad.add_(torch.randn_like(p), alpha=0.01 * random.random() + 0.01 * np.random.rand())
        optimizer.step()
    """,
    ),
    exact(
        "drawn-before-shards",
        "random numbers that are drawn between `for step in …` and the inner loop",
        before="factor = random.random() + float(torch.rand(())) + np.random.rand()",
        shard="""
            x, y = batch
            loss = F.cross_entropy(model(x * factor), y)
            loss.backward()
        """,
    ),
    exact("frozen-midway", "layers that are frozen and thawed", before="model[0].requires_grad_(step.number % 12 < 6)"),
    exact(
        "eval-midway",
        "modules that are put into eval mode in mid-run",
        model="model = nn.Sequential(nn.Linear(10, 16), nn.BatchNorm1d(16), nn.Dropout(0.5), nn.Linear(16, 3))",
        apply="""
            optimizer.step()
            if step.number == 3:
                model[1].eval()
                model[2].p = 0.2
        """,
    ),
    exact("several-loops", "several loops over steps", first=ONCE.format(steps=2), after=ONCE.format(steps=3)),
    exact(
        "break",
        "a loop that is left at a step",
        apply="""
        optimizer.step()
        if step.number == 37:
            break
    """,
    ),
    exact(
        "evaluate",
        "`run.evaluate` between steps, and a rate that goes by it",
        extras="""
        held_out = torch.utils.data.TensorDataset(x[:20] + 1, y[:20])

        def measure(batch):
            return {"loss": F.cross_entropy(model(batch[0]), batch[1])}
    """,
        apply="""
        optimizer.step()
        if step.number % 4 == 3:
            run.evaluate(held_out, measure, prefix="val_")
            optimizer.param_groups[0]["lr"] = 1e-2 * float(run.metrics["val_loss"])
    """,
    ),
    exact(
        "penalty-after-shards",
        "a backward after the shards, over what all workers have: a penalty on weights",
        apply="""
        (0.01 * sum(p.pow(2).sum() for p in model.parameters())).backward()
        optimizer.step()
    """,
    ),
    refused(
        "backward-after-shards",
        "a backward after the shards, over this worker's last batch",
        "backward() was called after the loop over the shards of step",
        shard="""
        x, y = batch
        loss = F.cross_entropy(model(x), y)
        loss.backward()
    """,
        apply="""
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
    """,
    ),
    refused(
        "wrapped-model",
        "a model in `DataParallel` and its like",
        "the model is wrapped in DataParallel, which spreads a batch over devices itself",
        model="""
        model = nn.DataParallel(nn.Linear(10, 3))
    """,
    ),
    refused(
        "seed-too-large",
        "a seed above 2**63 - 1",
        "seed is 18446744073709551615",
        options='options = {"batch_size": 24, "shards": 6, "seed": 2**64 - 1}',
    ),
    not_promised(
        "own-generator",
        "random numbers from a generator of the script's own",
        "it is not seeded for a shard; use the global ones",
        first="own = torch.Generator().manual_seed(3)",
        shard="""
            x, y = batch
            loss = F.cross_entropy(model(x + 0.1 * torch.randn(x.shape, generator=own)), y)
            loss.backward()
        """,
    ),
    not_promised(
        "counted-shards",
        "a count of the batches that this worker has seen",
        "workers see different numbers of them; use `step.number`",
        first="seen = 0",
        shard="""
            x, y = batch
            seen += 1
            loss = F.cross_entropy(model(x), y) * (0.99**seen)
            loss.backward()
        """,
    ),
    not_promised(
        "wall-clock",
        "the time of day",
        "every shard sees another",
        shard="""
            x, y = batch
            loss = F.cross_entropy(model(x), y) * (1 + time.time() % 1)
            loss.backward()
        """,
    ),
    refused(
        "pruned-midway",
        "pruning in mid-run",
        "the buffer 0.weight_mask came to be in a forward pass, after holdfast.join",
        imports="import torch.nn.utils.prune",
        apply="""
        optimizer.step()
        if step.number == 2:
            torch.nn.utils.prune.l1_unstructured(model[0], "weight", 0.5)
    """,
    ),
    refused(
        "layer-added-midway",
        "a layer that is added in mid-run",
        "the optimizer trains 2 of 6 parameters that are not in the model given to join",
        apply="""
        optimizer.step()
        if step.number == 2:
            model.append(nn.Linear(3, 3))
            optimizer.add_param_group({"params": list(model[3].parameters())})
    """,
    ),
    refused(
        "parameter-replaced",
        "a parameter that is replaced in mid-run, when a worker joins",
        "parameter group 0 of the run's optimizer has other parameters than this worker's",
        apply="""
        optimizer.step()
        if step.number == 2:
            model[0].weight = nn.Parameter(model[0].weight.detach() * 0.5)
    """,
    ),
    not_promised(
        "average-outside-extras",
        "an average of the weights that is not in `extras`",
        "a worker that joins begins its own; put it into `extras`",
        first="average = [p.detach().clone() for p in model.parameters()]",
        apply="""
        optimizer.step()
        with torch.no_grad():
            for p, mean in zip(model.parameters(), average):
                mean.lerp_(p, 0.1)
                p.lerp_(mean, 0.1)
    """,
    ),
]
