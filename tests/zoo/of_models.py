"""Shapes of models: layers, norms, attention, what autograd can do, buffers."""

from __future__ import annotations

from shape import Shape, exact, not_promised, refused

SEQUENCES = "dataset = torch.utils.data.TensorDataset(torch.randn(96, 7, 10, generator=samples), y)"
IMAGES = "dataset = torch.utils.data.TensorDataset(torch.randn(96, 3, 8, 8, generator=samples), y)"
PAIRS = "dataset = torch.utils.data.TensorDataset(torch.arange(96 * 2).view(96, 2) % 50, y)"


def between(name: str, what: str, layers: str) -> Shape:
    """Layers between the two of the plain model."""
    return exact(name, what, model=f"model = nn.Sequential(nn.Linear(10, 16), {layers}, nn.ReLU(), nn.Linear(16, 3))")


def module(forward: str, init: str) -> str:
    """A model with these lines."""
    space = "\n" + 8 * " "
    return (
        "class Model(nn.Module):\n    def __init__(self):\n        super().__init__()"
        + space
        + space.join(init.strip().splitlines())
        + "\n\n    def forward(self, x):"
        + space
        + space.join(forward.strip().splitlines())
        + "\n\nmodel = Model()"
    )


LAYERS = [
    between("batch-norm", "batch norm, whose statistics are the mean over shards", "nn.BatchNorm1d(16)"),
    between("batch-norm-cumulative", "batch norm with `momentum=None`", "nn.BatchNorm1d(16, momentum=None)"),
    between("layer-norm", "layer norm", "nn.LayerNorm(16)"),
    between("rms-norm", "RMS norm", "nn.RMSNorm(16)"),
    between("group-norm", "group norm", "nn.GroupNorm(4, 16)"),
    between(
        "dropouts",
        "dropout, alpha dropout, feature dropout",
        "nn.Dropout(0.3), nn.AlphaDropout(0.1), nn.FeatureAlphaDropout(0.1)",
    ),
    between("random-relu", "`RReLU`, which draws its slopes", "nn.RReLU()"),
    exact(
        "convolution",
        "convolutions with instance norm, local response norm and `Dropout2d`, channels last",
        data=IMAGES,
        model="""
        model = nn.Sequential(
            nn.Conv2d(3, 8, 3),
            nn.InstanceNorm2d(8, affine=True, track_running_stats=True),
            nn.LocalResponseNorm(2),
            nn.Dropout2d(0.2),
            nn.ReLU(),
            nn.ConvTranspose2d(8, 4, 3),
            nn.AvgPool2d(2),
            nn.Flatten(),
            nn.LazyLinear(3),
        )
        model(torch.randn(2, 3, 8, 8))  # which makes the lazy layer
        model = model.to(memory_format=torch.channels_last)
    """,
    ),
    exact(
        "lstm",
        "an LSTM with dropout",
        data=SEQUENCES,
        model=module(
            "return self.out(self.rnn(x)[0][:, -1])",
            """
self.rnn = nn.LSTM(10, 8, 2, batch_first=True, dropout=0.2)
self.out = nn.Linear(8, 3)
""",
        ),
    ),
    exact(
        "hidden-state-buffer",
        "recurrent state that is carried from step to step in a buffer",
        data=SEQUENCES,
        model=module(
            """
out, hidden = self.rnn(x, self.hidden.expand(1, len(x), 8).contiguous())
self.hidden = hidden.detach().mean(1, keepdim=True)
return self.out(out[:, -1])
""",
            """
self.rnn = nn.GRU(10, 8, batch_first=True)
self.out = nn.Linear(8, 3)
self.register_buffer("hidden", torch.zeros(1, 1, 8))
""",
        ),
    ),
    not_promised(
        "hidden-state-variable",
        "recurrent state that is carried from shard to shard in a variable or attribute",
        "it is what this worker's last shard left; keep it in a buffer, or start each shard from zeros",
        data=SEQUENCES,
        model=module(
            """
out, hidden = self.rnn(x, self.hidden)
self.hidden = hidden.detach()
return self.out(out[:, -1])
""",
            """
self.rnn = nn.GRU(10, 8, batch_first=True)
self.out = nn.Linear(8, 3)
self.hidden = None
""",
        ),
    ),
    exact(
        "attention",
        "scaled dot product attention with dropout, and a causal mask",
        data=SEQUENCES,
        model=module(
            """
q, k, v = self.inner(x).view(len(x), 7, 2, 3, 5).permute(3, 0, 2, 1, 4)
mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=0.1 if self.training else 0.0)
return self.out(mixed.transpose(1, 2).flatten(1))
""",
            """
self.inner = nn.Linear(10, 30)
self.out = nn.Linear(70, 3)
""",
        ),
    ),
    exact(
        "multihead-attention",
        "`nn.MultiheadAttention`",
        data=SEQUENCES,
        model=module(
            "return self.out(self.mix(x, x, x)[0].mean(1))",
            """
self.mix = nn.MultiheadAttention(10, 2, dropout=0.1, batch_first=True)
self.out = nn.Linear(10, 3)
""",
        ),
    ),
    exact(
        "transformer",
        "a transformer encoder",
        data=SEQUENCES,
        model=module(
            "return self.out(self.inner(x).mean(1))",
            """
layer = nn.TransformerEncoderLayer(10, 2, 16, batch_first=True)
self.inner = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
self.out = nn.Linear(10, 3)
""",
        ),
    ),
    exact(
        "ctc",
        "CTC loss",
        data=SEQUENCES,
        model="model = nn.Sequential(nn.Linear(10, 16), nn.ReLU(), nn.Linear(16, 4))",
        shard="""
        x, y = batch
        out = model(x).log_softmax(-1).transpose(0, 1)
        labels = torch.stack([y + 1, (y + 1) % 3 + 1], 1)
        lengths = torch.full((len(x),), 7), torch.full((len(x),), 2)
        loss = F.ctc_loss(out, labels, *lengths)
        loss.backward()
        step.record(loss=loss)
    """,
    ),
    exact(
        "scatter",
        "`index_add_`, `scatter_reduce`, `index_put_` with repeated places",
        model=module(
            """
x = self.inner(x)
places = torch.arange(x.shape[1]) % 5
sums = torch.zeros(len(x), 5).index_add(1, places, x)
means = torch.zeros(len(x), 5).scatter_reduce(1, places.expand(len(x), -1), x, "mean", include_self=False)
put = torch.zeros(len(x), 5).index_put((torch.arange(len(x))[:, None], places[None]), x, accumulate=True)
return self.out(sums + means + put)
""",
            """
self.inner = nn.Linear(10, 16)
self.out = nn.Linear(5, 3)
""",
        ),
    ),
    exact(
        "embedding",
        "an embedding with padding",
        data=PAIRS,
        model="model = nn.Sequential(nn.Embedding(50, 8, padding_idx=0), nn.Flatten(), nn.Linear(16, 3))",
    ),
    exact(
        "embedding-bag",
        "an embedding bag",
        data=PAIRS,
        model='model = nn.Sequential(nn.EmbeddingBag(50, 8, mode="mean"), nn.Linear(8, 3))',
    ),
    refused(
        "embedding-max-norm",
        "`nn.Embedding(max_norm=…)`, and whatever else changes parameters in a forward pass",
        "the parameter 0.weight was changed while a shard was computed, which only this worker does",
        data=PAIRS,
        model="model = nn.Sequential(nn.Embedding(50, 8, max_norm=1.0), nn.Flatten(), nn.Linear(16, 3))",
    ),
    refused(
        "embedding-sparse",
        "sparse gradients with an optimizer that takes them",
        "a gradient is sparse, and sparse gradients cannot be summed in a fixed order",
        data=PAIRS,
        model="model = nn.Sequential(nn.Embedding(50, 8, sparse=True), nn.Flatten(), nn.Linear(16, 3))",
        optimizer="optimizer = torch.optim.SGD(model.parameters(), lr=0.1)",
    ),
    exact(
        "weight-norm",
        "weight norm and orthogonal parametrizations",
        model="""
        from torch.nn.utils import parametrizations

        model = nn.Sequential(
            parametrizations.weight_norm(nn.Linear(10, 16)), nn.ReLU(), parametrizations.orthogonal(nn.Linear(16, 3))
        )
    """,
    ),
    exact(
        "spectral-norm",
        "spectral norm, whose buffers change in the forward pass",
        model="""
        from torch.nn.utils import parametrizations

        model = nn.Sequential(parametrizations.spectral_norm(nn.Linear(10, 16)), nn.ReLU(), nn.Linear(16, 3))
    """,
    ),
    exact(
        "tied",
        "tied weights",
        model=module(
            "return self.out(self.second(self.first(x).relu()).relu())",
            """
self.first, self.second, self.out = nn.Linear(10, 10), nn.Linear(10, 10), nn.Linear(10, 3)
self.second.weight = self.first.weight
""",
        ),
    ),
    exact(
        "partly-used",
        "a part of the model that only some samples use",
        model=module(
            """
out = self.first(x)
return out + self.rare(x) if x[0, 0] > 0.5 else out
""",
            """
self.first, self.rare, self.never = nn.Linear(10, 3), nn.Linear(10, 3), nn.Linear(10, 3)
""",
        ),
    ),
    exact(
        "many-parameters",
        "5,000 small parameters",
        model=module(
            """
return x @ torch.stack(list(self.columns)).view(10, 500) @ self.out
""",
            """
self.columns = nn.ParameterList([torch.randn(()) / 30 for _ in range(5000)])
self.out = nn.Parameter(torch.randn(500, 3) / 30)
""",
        ),
        options='options = {"batch_size": 4, "shards": 2}',
        optimizer="optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9, foreach=True)",
    ),
    exact(
        "large-parameter",
        "one parameter of 300 MB",
        nightly=True,
        model="model = nn.Sequential(nn.Linear(10, 16), nn.ReLU(), nn.Linear(16, 4_900_000), nn.AvgPool1d(1_600_000))",
        optimizer="optimizer = torch.optim.SGD(model.parameters(), lr=0.1)",
        options='options = {"batch_size": 4, "shards": 2}',
    ),
    exact(
        "stochastic-depth",
        "layers that are left out by chance",
        model="""
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.maybe, self.out = nn.Linear(10, 16), nn.Linear(16, 16), nn.Linear(16, 3)

    def forward(self, x):
        x = self.first(x).relu()
        return self.out(x + self.maybe(x) if random.random() < 0.5 else x)

model = Model()
""",
    ),
    exact(
        "sync-batch-norm",
        "`SyncBatchNorm`, outside of a process group",
        model="""
        model = nn.Sequential(nn.Linear(10, 16), nn.SyncBatchNorm(16), nn.ReLU(), nn.Linear(16, 3))
    """,
    ),
    exact(
        "pruned",
        "pruning, before `join`: a mask in a buffer",
        model="""
        import torch.nn.utils.prune

        model = nn.Sequential(nn.Linear(10, 16), nn.ReLU(), nn.Linear(16, 3))
        torch.nn.utils.prune.l1_unstructured(model[0], "weight", 0.5)
    """,
    ),
]

AUTOGRAD = [
    exact(
        "checkpointing",
        "activation checkpointing with dropout inside",
        model=module(
            """
return self.out(torch.utils.checkpoint.checkpoint(self.inner, x, use_reentrant=False))
""",
            """
self.inner = nn.Sequential(nn.Linear(10, 16), nn.Dropout(0.3), nn.ReLU())
self.out = nn.Linear(16, 3)
""",
        ),
        imports="import torch.utils.checkpoint",
    ),
    exact(
        "gradient-penalty",
        "double backward: a penalty on gradients",
        model="model = nn.Sequential(nn.Linear(10, 16), nn.Tanh(), nn.Linear(16, 3))",
        shard="""
        x, y = batch
        x = x.clone().requires_grad_(True)
        loss = F.cross_entropy(model(x), y)
        (slope,) = torch.autograd.grad(loss, x, create_graph=True)
        (loss + slope.pow(2).sum()).backward()
        step.record(loss=loss)
    """,
    ),
    exact(
        "compile-eager",
        '`torch.compile(backend="eager")`',
        model="""
        model = nn.Sequential(nn.Linear(10, 16), nn.ReLU(), nn.Linear(16, 3))
        model = torch.compile(model, backend="eager", dynamic=False)
    """,
    ),
    exact(
        "compile-inductor",
        "`torch.compile` with inductor and `dynamic=False`",
        nightly=True,
        model="""
        model = nn.Sequential(nn.Linear(10, 16), nn.ReLU(), nn.Linear(16, 3))
        model = torch.compile(model, dynamic=False)
    """,
    ),
    exact(
        "jit-script",
        "`torch.jit.script`",
        model="""
        import warnings

        warnings.simplefilter("ignore")
        model = torch.jit.script(nn.Sequential(nn.Linear(10, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 3)))
    """,
    ),
    exact(
        "per-sample-gradients",
        "`torch.func.vmap` and `grad`: clipped gradients of each sample",
        shard="""
        x, y = batch

        def loss_of(parameters, a, b):
            return F.cross_entropy(torch.func.functional_call(model, parameters, (a[None],)), b[None])

        each = torch.func.vmap(torch.func.grad(loss_of), in_dims=(None, 0, 0))(dict(model.named_parameters()), x, y)
        for name, p in model.named_parameters():
            p.grad = each[name].clamp(-0.1, 0.1).mean(0).detach()
    """,
    ),
    exact(
        "own-function",
        "an autograd function of the script's own",
        model="""
        class Straight(torch.autograd.Function):
            @staticmethod
            def forward(context, x):
                return x.sign()

            @staticmethod
            def backward(context, slope):
                return slope.clamp(-1, 1)

        class Signs(nn.Module):
            def forward(self, x):
                return Straight.apply(x)

        model = nn.Sequential(nn.Linear(10, 16), Signs(), nn.Linear(16, 3))
    """,
    ),
    exact(
        "hooks",
        "forward hooks, and hooks that scale gradients",
        model="""
        model = nn.Sequential(nn.Linear(10, 16), nn.ReLU(), nn.Linear(16, 3))
        model[0].register_forward_hook(lambda module, args, out: out * 1.1)
        model[2].register_full_backward_hook(lambda module, before, after: (before[0] * 0.9,))
        for p in model.parameters():
            p.register_hook(lambda slope: slope * 0.5)
    """,
    ),
    exact(
        "hook-restrides",
        "a hook that gives gradients other strides, and a norm after it",
        model="""
        def turn(p):
            p.grad = p.grad.t().contiguous().t() if p.ndim == 2 else p.grad

        model = nn.Sequential(nn.Linear(10, 64), nn.ReLU(), nn.Linear(64, 3))
        for p in model.parameters():
            p.register_post_accumulate_grad_hook(turn)
    """,
        apply="nn.utils.clip_grad_norm_(model.parameters(), 0.01)\noptimizer.step()",
    ),
    refused(
        "sharpness-aware",
        "weights that are moved and moved back within a shard (SAM)",
        "the parameter 0.weight was changed while a shard was computed, which only this worker does",
        shard="""
        x, y = batch
        F.cross_entropy(model(x), y).backward()
        moves = [0.05 * p.grad for p in model.parameters()]
        with torch.no_grad():
            for p, move in zip(model.parameters(), moves):
                p.add_(move)
        model.zero_grad()
        F.cross_entropy(model(x), y).backward()
        with torch.no_grad():
            for p, move in zip(model.parameters(), moves):
                p.sub_(move)
    """,
    ),
]

BUFFERS = [
    refused(
        "buffer-none",
        "a persistent buffer that is None until a forward pass",
        "the buffer mean came to be in a forward pass, after holdfast.join",
        model=module(
            """
new = x.detach().mean(0)
self.mean = new if self.mean is None else 0.9 * self.mean + 0.1 * new
return self.out(x - self.mean)
""",
            """
self.out = nn.Linear(10, 3)
self.register_buffer("mean", None)
""",
        ),
    ),
    refused(
        "buffer-registered-late",
        "a persistent buffer that a forward pass registers",
        "the buffer mean came to be in a forward pass, after holdfast.join",
        model=module(
            """
if not hasattr(self, "mean"):
    self.register_buffer("mean", torch.zeros(10))
self.mean.mul_(0.9).add_(x.detach().mean(0), alpha=0.1)
return self.out(x - self.mean)
""",
            "self.out = nn.Linear(10, 3)",
        ),
    ),
    exact(
        "buffers-of-all-kinds",
        "buffers of float8, uint16, uint64, float16 and int64 that change",
        model=module(
            """
self.eight = (self.eight.float() + x.detach().mean()).to(torch.float8_e4m3fn)
self.short = (self.short.int() + 1).to(torch.uint16)
self.nanoseconds.add_(1)
self.sixteen.add_(16)
self.mask ^= True
return self.out(x) * (1 + self.sixteen.float() / 1e5)
""",
            """
self.out = nn.Linear(10, 3)
self.register_buffer("eight", torch.zeros(4).to(torch.float8_e4m3fn))
self.register_buffer("short", torch.zeros(4, dtype=torch.uint16))
self.register_buffer("large", torch.full((2,), 2**63 + 5, dtype=torch.uint64))
self.register_buffer("nanoseconds", torch.tensor(1_790_000_000_000_000_000))
self.register_buffer("sixteen", torch.tensor([20000.0], dtype=torch.float16))
self.register_buffer("mask", torch.tensor([False]))
""",
        ),
    ),
    exact(
        "cache-between-loops",
        "a cache buffer that grows between two loops",
        model=module(
            """
if len(self.ones) < x.shape[1]:
    self.ones = torch.ones(x.shape[1])
return self.out((x * self.ones[: x.shape[1]])[:, :10])
""",
            """
self.out = nn.Linear(10, 3)
self.register_buffer("ones", torch.ones(10), persistent=False)
""",
        ),
        first="""
        for step in run.steps(2):
            for x, y in step:
                F.cross_entropy(model(x), y).backward()
            optimizer.step()
        model(torch.ones(1, 20))
    """,
    ),
]
