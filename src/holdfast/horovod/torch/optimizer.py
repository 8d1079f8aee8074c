"""DistributedOptimizer: the user's optimizer, whose gradients are those of all ranks.

Gradients are reduced while the backward pass goes on: parameters are cut into buckets, in the reverse of their order,
and a bucket is submitted as soon as its last gradient is there. Buckets are the same on every rank, whatever order
gradients come in; a gradient that this rank does not have counts as zero. With HOLDFAST_SHARDS a backward pass is one
of this rank's shards (shard_sums.py), and all buckets are submitted after the last of them.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import torch

from holdfast.horovod.basics import Adasum, Average
from holdfast.horovod.exchange.words import Kind, Op
from holdfast.horovod.process_sets import ProcessSet, global_process_set
from holdfast.horovod.torch.compression import Compression, Compressor
from holdfast.horovod.torch.handles import ask, refuse, synchronize
from holdfast.horovod.torch.reductions import grouped_allreduce_, grouped_allreduce_async_, sparse_allreduce_async
from holdfast.horovod.torch.shard_sums import ShardSums, allreduce_shards_async_
from holdfast.horovod.world.runtime import runtime

Parameter = torch.Tensor
BUCKET_BYTES = 4 * 1024 * 1024
TOO_MANY_PASSES = (
    "gradients were computed more than backward_passes_per_step times before step(): give a larger "
    "backward_passes_per_step to add them up on this rank"
)
Named = Iterable[tuple[str, Parameter]]


def named_list(optimizer: torch.optim.Optimizer, named_parameters: Named | None) -> list[tuple[str, Parameter]]:
    """The parameters with their names, checked: ValueError if they are not those of the optimizer."""
    everything = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    if named_parameters is None:
        return [(f"noname.{at}.{tuple(one.shape)}", one) for at, one in enumerate(everything)]  # two may be under way
    named = list(named_parameters)
    if any(not isinstance(one, tuple) or len(one) != 2 for one in named):
        raise ValueError("named_parameters are pairs of a name and a parameter, as model.named_parameters() gives them")
    names = [name for name, _ in named]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise ValueError(f"names of parameters must be unique, and these are not: {', '.join(twice)}")
    known = {id(parameter) for _, parameter in named}
    if missing := sum(id(parameter) not in known for parameter in everything):
        raise ValueError(f"named_parameters lacks {missing} of the parameters that the optimizer has")
    ours = {id(parameter) for parameter in everything}
    return [(name, parameter) for name, parameter in named if id(parameter) in ours]


def cut(
    named: Sequence[tuple[str, Parameter]], groups: int | Sequence[Sequence[Parameter]] | None
) -> list[list[Parameter]]:
    """The parameters that are reduced together."""
    wanted = [parameter for _, parameter in named if parameter.requires_grad]
    if isinstance(groups, int) and groups > 0:
        least, more = divmod(len(wanted), groups)
        sizes = [least + (number < more) for number in range(groups)]
        edges = [sum(sizes[:number]) for number in range(groups + 1)]
        return [wanted[low:high] for low, high in pairwise(edges) if low < high]
    if isinstance(groups, Sequence):
        ours = {id(parameter) for parameter in wanted}
        given = [[parameter for parameter in group if id(parameter) in ours] for group in groups]
        seen = [id(parameter) for group in given for parameter in group]
        if len(seen) != len(set(seen)):
            raise ValueError("a parameter can be in one group only")
        rest = [[parameter] for parameter in wanted if id(parameter) not in set(seen)]
        return [group for group in (*given, *rest) if group]
    buckets: list[list[Parameter]] = []
    size = BUCKET_BYTES
    for parameter in reversed(wanted):
        nbytes = parameter.numel() * parameter.element_size()
        if size + nbytes > BUCKET_BYTES or buckets[-1][-1].dtype is not parameter.dtype:
            buckets.append([])
            size = 0
        buckets[-1].append(parameter)
        size += nbytes
    return buckets


class _Bucket:
    """Gradients that are reduced together, and how far they are."""

    def __init__(self, name: str, parameters: Sequence[Parameter]) -> None:
        self.name = name
        self.parameters = list(parameters)
        self.left: dict[int, int] = {}  # parameter -> how many backward passes are still to come
        self.under_way: tuple[int | None, list[Parameter], list[Any], list[Any]] | None = None

    def begin(self, passes: int) -> None:
        self.passes = passes
        self.left = {id(parameter): passes for parameter in self.parameters}
        self.under_way = None

    @property
    def has_begun(self) -> bool:
        return any(left < self.passes for left in self.left.values())

    @property
    def is_full(self) -> bool:
        return not any(self.left.values())


class _Distributed(torch.optim.Optimizer):
    """What is put before the user's optimizer class. Its state and its groups are the wrapped optimizer's own."""

    _buckets: list[_Bucket]
    _names: dict[int, str]

    def _distribute(
        self, named: list[tuple[str, Parameter]], groups: Any, settings: dict[str, Any], process_set: ProcessSet
    ) -> None:
        self._names = {id(parameter): name for name, parameter in named}
        self._compression: type[Compressor] = settings["compression"]
        self.op: Op = settings["op"]
        self.backward_passes_per_step: int = settings["backward_passes_per_step"]
        self.gradient_predivide_factor: float = settings["gradient_predivide_factor"]
        self.sparse_as_dense: bool = settings["sparse_as_dense"]
        self.process_set = process_set
        self._synchronized, self._should_synchronize = False, True
        self._buckets = [_Bucket(f"gradients.{self._names[id(one[0])]}", one) for one in cut(named, groups)]
        self._bucket_of = {id(parameter): bucket for bucket in self._buckets for parameter in bucket.parameters}
        self._sums: ShardSums | None = None
        if runtime().is_initialized and runtime().shards and process_set.included():
            ours = [parameter for bucket in self._buckets for parameter in bucket.parameters]
            self._sums = ShardSums(ours, process_set, self._submit_all)
        self._begin_all()
        self._hooks = []
        if process_set.included():
            for bucket in self._buckets:
                for parameter in bucket.parameters:
                    hook = parameter.register_post_accumulate_grad_hook(self._arrived)  # type: ignore[no-untyped-call]
                    self._hooks.append(hook)

    def _begin_all(self) -> None:
        for bucket in self._buckets:
            bucket.begin(self.backward_passes_per_step)
        if self._sums is not None:
            self._sums.begin()

    def set_backward_passes_per_step(self, passes: int) -> None:
        self.backward_passes_per_step = passes
        self._begin_all()

    def load_state_dict(self, state_dict: Any) -> None:
        self._synchronized, self._should_synchronize = False, True
        self._begin_all()
        super().load_state_dict(state_dict)

    def _arrived(self, parameter: Parameter) -> None:
        """A gradient is there, in the middle of the backward pass."""
        if self._sums is not None:
            self._sums.arrived()
            return
        bucket = self._bucket_of[id(parameter)]
        if bucket.left[id(parameter)] <= 0:
            raise AssertionError(TOO_MANY_PASSES)
        bucket.left[id(parameter)] -= 1
        if bucket.is_full:
            self._submit(bucket)

    def _submit_all(self) -> None:
        for bucket in self._buckets:
            self._submit(bucket)

    def _submit(self, bucket: _Bucket) -> None:
        if self._sums is not None:
            self._submit_shards(bucket, self._sums)
            return
        dense: list[Parameter] = []
        sparse: list[Parameter] = []
        for parameter in bucket.parameters:
            if parameter.grad is None:  # another rank may have one
                parameter.grad = torch.zeros_like(parameter, memory_format=torch.preserve_format)
            (sparse if parameter.grad.is_sparse and not self.sparse_as_dense else dense).append(parameter)
        packed = [
            self._compression.compress(_dense(parameter.grad)) for parameter in dense if parameter.grad is not None
        ]
        factor = self.gradient_predivide_factor if self.op is Average else 1.0
        handle = None
        if packed:
            handle = grouped_allreduce_async_(
                [one for one, _ in packed],
                name=bucket.name,
                op=self.op,
                prescale_factor=1.0 / factor,
                postscale_factor=factor,
                process_set=self.process_set,
            )
        rows = [
            (one, sparse_allreduce_async(one.grad, self._names[id(one)], self.op, self.process_set))
            for one in sparse
            if one.grad is not None
        ]
        bucket.under_way = (handle, dense, [about for _, about in packed], rows)

    def _submit_shards(self, bucket: _Bucket, sums: ShardSums) -> None:
        nodes = [[self._compression.compress(one) for one in row] for row in sums.rows(bucket.parameters)]
        outputs = nodes[0] if nodes else [self._compression.compress(torch.zeros_like(p)) for p in bucket.parameters]
        for parameter, (one, _) in zip(bucket.parameters, outputs, strict=True):
            parameter.grad = one if one.dtype is parameter.dtype else torch.zeros_like(parameter)
        factor = self.gradient_predivide_factor if self.op is Average else 1.0
        handle = allreduce_shards_async_(
            [one for one, _ in outputs],
            [[one for one, _ in row] for row in nodes],
            sums,
            bucket.name,
            self.op,
            self.process_set,
            prescale=1.0 / factor,
            postscale=factor,
        )
        bucket.under_way = (handle, bucket.parameters, [about for _, about in outputs], [])

    def synchronize(self) -> None:
        """Wait until every gradient is that of all ranks."""
        if self._sums is not None and (why := self._sums.trouble()):
            refuse(ask(Kind.ALLREDUCE, (), self._buckets[0].name, self.process_set), why)
        if self.process_set.included():
            for bucket in self._buckets:
                if bucket.under_way is None:
                    self._submit(bucket)
            for bucket in self._buckets:
                self._receive(bucket)
                bucket.begin(self.backward_passes_per_step)
            if self._sums is not None:
                self._sums.begin()
        self._synchronized = True

    def _receive(self, bucket: _Bucket) -> None:
        assert bucket.under_way is not None
        handle, dense, abouts, rows = bucket.under_way
        found = synchronize(handle) if handle is not None else []
        for parameter, one, about in zip(dense, found, abouts, strict=True):
            reduced = self._compression.decompress(one, about)
            assert parameter.grad is not None
            if parameter.grad.is_sparse:
                parameter.grad = reduced.to_sparse()
            elif reduced.data_ptr() != parameter.grad.data_ptr():
                parameter.grad.copy_(reduced)
        for parameter, finish in rows:
            parameter.grad = finish()

    @contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """Around a step() whose gradients were waited for with synchronize(), to clip them for one."""
        self._should_synchronize = False
        try:
            yield
        finally:
            self._should_synchronize = True

    def step(self, closure: Any = None) -> Any:
        if self._should_synchronize:
            if self._synchronized:
                warnings.warn(
                    "optimizer.step() after optimizer.synchronize() reduces the gradients once more: use "
                    "`with optimizer.skip_synchronize():` around the step",
                    stacklevel=2,
                )
            self.synchronize()
        self._synchronized = False
        return super().step(closure)

    def zero_grad(self, *args: Any, **kwargs: Any) -> None:
        if any(bucket.has_begun for bucket in self._buckets) or (self._sums is not None and self._sums.passes):
            raise AssertionError(
                "optimizer.zero_grad() came after loss.backward() and before step() or synchronize(): the gradients "
                "are on their way"
            )
        super().zero_grad(*args, **kwargs)


class _DistributedAdasum(torch.optim.Optimizer):
    """Adasum combines what the optimizer does to the parameters, rather than gradients: dense, whatever those are."""

    process_set: ProcessSet
    backward_passes_per_step: int
    _compression: type[Compressor]
    _passes: dict[int, int]  # parameter -> backward passes since the last step

    def _distribute(self, settings: dict[str, Any], process_set: ProcessSet) -> None:
        self.process_set = process_set
        self._compression = settings["compression"]
        self.backward_passes_per_step = settings["backward_passes_per_step"]
        self._passes = {}
        self._hooks = [
            one.register_post_accumulate_grad_hook(self._arrived)
            for group in self.param_groups
            for one in group["params"]
            if one.requires_grad
        ]

    def set_backward_passes_per_step(self, passes: int) -> None:
        self.backward_passes_per_step = passes

    def _arrived(self, parameter: Parameter) -> None:
        passes = self._passes[id(parameter)] = self._passes.get(id(parameter), 0) + 1
        if passes > self.backward_passes_per_step:
            raise AssertionError(TOO_MANY_PASSES)

    def synchronize(self) -> None:
        """There is nothing to wait for: step() does all."""

    def skip_synchronize(self) -> None:
        raise AssertionError("with Adasum there is nothing to skip: step() combines the steps themselves")

    def step(self, closure: Any = None) -> Any:
        parameters = [one for group in self.param_groups for one in group["params"] if one.requires_grad]
        before = [one.detach().clone() for one in parameters]
        self._passes.clear()
        loss = super().step(closure)
        self._passes.clear()
        with torch.no_grad():
            steps = [one.detach() - old for one, old in zip(parameters, before, strict=True)]
            packed = [self._compression.compress(step) for step in steps]
            grouped_allreduce_([one for one, _ in packed], op=Adasum, process_set=self.process_set)
            for parameter, old, (one, about) in zip(parameters, before, packed, strict=True):
                parameter.copy_(old + self._compression.decompress(one, about))
        return loss


def _dense(gradient: torch.Tensor | None) -> torch.Tensor:
    assert gradient is not None
    return gradient.to_dense() if gradient.is_sparse else gradient


def DistributedOptimizer(
    optimizer: torch.optim.Optimizer,
    named_parameters: Named | None = None,
    compression: type[Compressor] = Compression.none,
    backward_passes_per_step: int = 1,
    op: Op = Average,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: int | Sequence[Sequence[Parameter]] | None = None,
    sparse_as_dense: bool = False,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """An optimizer of the same class, with the same parameters and state, that steps by all ranks' gradients."""
    if gradient_predivide_factor != 1.0 and op != Average:
        raise ValueError("gradient_predivide_factor is for op=hvd.Average")
    if num_groups:
        warnings.warn("num_groups is old: give groups", DeprecationWarning, stacklevel=2)
        groups = groups or num_groups
    if groups is not None and not isinstance(groups, list) and not (isinstance(groups, int) and groups >= 0):
        raise ValueError("groups is a whole number, or a list of lists of parameters")
    if isinstance(groups, list) and not all(isinstance(one, torch.Tensor) for group in groups for one in group):
        raise ValueError("groups consist of parameters, which are tensors")
    named = named_list(optimizer, named_parameters)
    before = _DistributedAdasum if op == Adasum else _Distributed
    kind: Any = type(optimizer.__class__.__name__, (before, optimizer.__class__), {})
    wrapped = kind.__new__(kind)
    wrapped.__dict__.update({name: value for name, value in optimizer.__dict__.items() if name != "step"})
    settings = {
        "compression": compression,
        "op": Op(op),
        "backward_passes_per_step": backward_passes_per_step,
        "gradient_predivide_factor": gradient_predivide_factor,
        "sparse_as_dense": sparse_as_dense,
    }
    if op == Adasum:
        wrapped._distribute(settings, process_set)
    else:
        wrapped._distribute(named, groups, settings, process_set)
    return wrapped
