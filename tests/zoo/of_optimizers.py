"""Shapes of optimizers, schedules and precision."""

from __future__ import annotations

from shape import Shape, exact, refused


def optimizer(name: str, call: str) -> Shape:
    """One of torch.optim over the plain model."""
    kind, _, arguments = call.partition("(")
    words = arguments.removesuffix(")")
    what = f"`{kind}`" + (f", `{words}`" if words else "")
    return exact(name, what, optimizer=f"optimizer = torch.optim.{kind}(model.parameters(), {words})")


OPTIMIZERS = [
    optimizer("sgd", "SGD(lr=0.1)"),
    optimizer("sgd-nesterov", "SGD(lr=0.1, momentum=0.9, nesterov=True, weight_decay=1e-3)"),
    optimizer("sgd-foreach", "SGD(lr=0.1, momentum=0.9, dampening=0.1, foreach=True)"),
    optimizer("sgd-fused", "SGD(lr=0.1, momentum=0.9, fused=True)"),
    optimizer("adam-amsgrad", "Adam(lr=1e-2, amsgrad=True)"),
    optimizer("adam-tensor-lr", "Adam(lr=torch.tensor(1e-2), capturable=False)"),
    optimizer("adamw-foreach", "AdamW(lr=1e-2, foreach=True)"),
    optimizer("adamw-fused", "AdamW(lr=1e-2, fused=True)"),
    optimizer("adamax", "Adamax(lr=1e-2)"),
    optimizer("adagrad", "Adagrad(lr=1e-2, lr_decay=1e-3)"),
    optimizer("adagrad-fused", "Adagrad(lr=1e-2, fused=True)"),
    optimizer("adadelta", "Adadelta(lr=1.0)"),
    optimizer("rmsprop", "RMSprop(lr=1e-2, centered=True, momentum=0.9)"),
    optimizer("rprop", "Rprop(lr=1e-2)"),
    optimizer("nadam", "NAdam(lr=1e-2)"),
    optimizer("radam", "RAdam(lr=1e-2, decoupled_weight_decay=True, weight_decay=1e-2)"),
    optimizer("asgd", "ASGD(lr=1e-2, t0=8)"),
    optimizer("adafactor", "Adafactor(lr=1e-2)"),
    exact(
        "muon",
        "`Muon` for matrices beside `AdamW` for the rest",
        optimizer="""
            if not hasattr(torch.optim, "Muon"):
                torch.optim.Muon = torch.optim.AdamW  # an older torch
            matrices = [p for p in model.parameters() if p.ndim == 2]
            others = [p for p in model.parameters() if p.ndim != 2]
            optimizer = {"muon": torch.optim.Muon(matrices, lr=1e-2), "adamw": torch.optim.AdamW(others, lr=1e-2)}
        """,
        apply="""
            for one in optimizer.values():
                one.step()
        """,
    ),
    exact(
        "own-optimizer",
        "an optimizer of the script's own, with a momentum in its state",
        imports="""
            class Signs(torch.optim.Optimizer):
                def __init__(self, parameters, lr):
                    super().__init__(parameters, {"lr": lr})

                @torch.no_grad()
                def step(self, closure=None):
                    for group in self.param_groups:
                        for p in group["params"]:
                            if p.grad is not None:
                                mean = self.state[p].setdefault("mean", torch.zeros_like(p))
                                mean.lerp_(p.grad, 0.1)
                                p.add_(mean.sign(), alpha=-group["lr"])
        """,
        optimizer="optimizer = Signs(model.parameters(), lr=1e-2)",
    ),
    refused(
        "sparse-adam",
        "`SparseAdam` and sparse gradients",
        "a gradient is sparse, and sparse gradients cannot be summed in a fixed order",
        data="dataset = torch.utils.data.TensorDataset(torch.arange(96 * 2).view(96, 2) % 50, y)",
        model="""
            model = nn.Sequential(nn.Embedding(50, 8, sparse=True), nn.Flatten(), nn.Linear(16, 3))
            model[2].requires_grad_(False)
        """,
        optimizer="optimizer = torch.optim.SparseAdam(model[0].parameters(), lr=1e-2)",
    ),
    refused(
        "lbfgs",
        "`LBFGS`",
        "the optimizer is LBFGS, which computes gradients several times in a step from what one worker has at hand",
        optimizer="optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=4)",
    ),
    refused(
        "closure",
        "a closure given to `optimizer.step`",
        "optimizer.step() was given a closure, whose gradients would be only this worker's",
        apply="""
            def closure():
                return F.cross_entropy(model(x), y)

            optimizer.step(closure)
        """,
    ),
    refused(
        "optimizer-without-groups",
        "an optimizer whose `state_dict` lacks `param_groups`",
        "the state_dict of the optimizer, a Bare, lacks the entries state and param_groups",
        optimizer="""
            class Bare(torch.optim.SGD):
                def state_dict(self):
                    return {"nothing": 1}

            optimizer = Bare(model.parameters(), lr=0.1)
        """,
    ),
    exact(
        "two-optimizers",
        "a generator and a discriminator, each with an optimizer",
        model="""
            judge = nn.Sequential(nn.Linear(10, 16), nn.ReLU(), nn.Linear(16, 1))
            model = nn.ModuleDict({"g": nn.Linear(4, 10), "d": judge})
        """,
        optimizer="""
            optimizer = {
                "g": torch.optim.Adam(model["g"].parameters(), lr=1e-2, betas=(0.5, 0.99)),
                "d": torch.optim.SGD(model["d"].parameters(), lr=1e-2, momentum=0.9),
            }
        """,
        shard="""
            made = model["g"](torch.randn(len(batch[0]), 4))
            real, false = model["d"](batch[0]), model["d"](made.detach())
            loss = F.softplus(-real).mean() + F.softplus(false).mean()
            loss.backward()
            F.softplus(-model["d"](made)).mean().backward(inputs=list(model["g"].parameters()))
            step.record(loss=loss)
        """,
        apply="""
            optimizer["d"].step()
            optimizer["g"].step()
        """,
    ),
    exact(
        "optimizers-in-turn",
        "two optimizers that take turns",
        model="model = nn.ModuleList([nn.Linear(10, 16), nn.Linear(16, 3)])",
        optimizer="""
            optimizer = {str(n): torch.optim.RMSprop(part.parameters(), lr=1e-2) for n, part in enumerate(model)}
        """,
        shard="""
            x, y = batch
            turn = step.number % 2
            loss = F.cross_entropy(model[1](model[0](x).tanh()), y)
            loss.backward(inputs=list(model[turn].parameters()))
        """,
        apply="optimizer[str(step.number % 2)].step()",
    ),
    exact(
        "groups",
        "parameter groups with settings of their own",
        optimizer="""
            optimizer = torch.optim.AdamW(
                [
                    {"params": model[0].parameters(), "lr": 1e-3},
                    {"params": model[2].parameters(), "weight_decay": 0.0},
                ],
                lr=1e-2,
            )
        """,
    ),
    exact(
        "group-added-midway",
        "`add_param_group` in mid-run",
        optimizer="optimizer = torch.optim.AdamW(model[2].parameters(), lr=1e-2)",
        apply="""
            optimizer.step()
            if step.number == 2:
                optimizer.add_param_group({"params": list(model[0].parameters())})
        """,
    ),
    exact(
        "optimizer-hooks",
        "hooks of the optimizer's step",
        optimizer="""
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        optimizer.register_step_post_hook(lambda *ignored: [p.data.clamp_(-0.3, 0.3) for p in model.parameters()])
    """,
    ),
]

SCHEDULES = [
    exact(
        "schedulers",
        "every scheduler of `torch.optim.lr_scheduler`, in `extras`",
        model="model = nn.ModuleList([nn.Linear(10, 3) for _ in range(14)])",
        optimizer="""
            import torch.optim.lr_scheduler as lr

            o = [torch.optim.SGD(part.parameters(), lr=0.05, momentum=0.9) for part in model]
            optimizer = {f"o{n}": one for n, one in enumerate(o)}
        """,
        extras="""
            schedulers = [
                lr.StepLR(o[0], 5),
                lr.MultiStepLR(o[1], [3, 9, 20]),
                lr.ExponentialLR(o[2], 0.95),
                lr.CosineAnnealingLR(o[3], 15),
                lr.CosineAnnealingWarmRestarts(o[4], 7),
                lr.OneCycleLR(o[5], 0.1, total_steps=STEPS + 1),
                lr.CyclicLR(o[6], 0.01, 0.1, step_size_up=4),
                lr.LambdaLR(o[7], lambda n: 1 / (1 + n)),
                lr.MultiplicativeLR(o[8], lambda n: 0.97),
                lr.PolynomialLR(o[9], 30, power=2),
                lr.SequentialLR(o[10], [lr.LinearLR(o[10], 0.1), lr.CosineAnnealingLR(o[10], 20)], [5]),
                lr.ChainedScheduler([lr.ConstantLR(o[11], 0.5, 4), lr.ExponentialLR(o[11], 0.9)]),
                lr.LinearLR(o[12], 0.1, total_iters=20),
                lr.ReduceLROnPlateau(o[13], patience=1),
            ]
            extras.update({f"s{n}": scheduler for n, scheduler in enumerate(schedulers)})
        """,
        shard="""
            x, y = batch
            loss = sum(F.cross_entropy(part(x), y) for part in model)
            loss.backward()
            step.record(loss=loss)
        """,
        apply="""
            for one in o:
                one.step()
            for scheduler in schedulers[:-1]:
                scheduler.step()
            schedulers[-1].step(step.metrics["loss"])
        """,
    ),
    exact(
        "averaged-model",
        "an exponential average of the weights, an `AveragedModel` in `extras`",
        extras="""
            from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

            average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
            extras["average"] = average
        """,
        apply="""
            optimizer.step()
            average.update_parameters(model)
            if step.number % 10 == 9:  # the average decides bits, too
                model.load_state_dict(average.module.state_dict())
        """,
    ),
    exact(
        "float64",
        "weights in float64",
        model="model = nn.Sequential(nn.Linear(10, 16), nn.Tanh(), nn.Linear(16, 3)).double()",
        shard="""
            x, y = batch
            loss = F.cross_entropy(model(x.double()), y)
            loss.backward()
        """,
    ),
    exact(
        "bfloat16",
        "weights in bfloat16",
        model="model = nn.Sequential(nn.Linear(10, 16), nn.LayerNorm(16), nn.ReLU(), nn.Linear(16, 3)).bfloat16()",
        shard="""
            x, y = batch
            loss = F.cross_entropy(model(x.bfloat16()).float(), y)
            loss.backward()
        """,
    ),
    exact(
        "complex",
        "complex weights",
        model="""
            class Turned(nn.Module):
                def __init__(self):
                    super().__init__()
                    self.turn = nn.Parameter(torch.randn(10, 3, dtype=torch.complex64))

                def forward(self, x):
                    return (x.to(torch.complex64) @ self.turn).abs()

            model = Turned()
        """,
    ),
    exact(
        "autocast",
        "`torch.autocast` in each shard",
        shard="""
            x, y = batch
            with torch.autocast("cpu", dtype=torch.bfloat16):
                out = model(x)
            loss = F.cross_entropy(out.float(), y)
            loss.backward()
        """,
    ),
    exact(
        "autocast-outside",
        "`torch.autocast` entered once around both loops",
        first='torch.autocast("cpu", dtype=torch.bfloat16).__enter__()',
    ),
    exact(
        "gradient-scaler",
        "mixed precision with a `GradScaler` in `extras`, and a step that overflows",
        extras='scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=4)\nextras["scaler"] = scaler',
        options='options = {"batch_size": 24, "shards": 6, "non_finite": "skip"}',
        shard="""
            x, y = batch
            with torch.autocast("cpu", dtype=torch.bfloat16):
                out = model(x)
            loss = F.cross_entropy(out.float(), y)
            scaler.scale(loss * (float("inf") if step.number in (4, 11) else 1.0)).backward()
        """,
        apply="""
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
        """,
    ),
]
