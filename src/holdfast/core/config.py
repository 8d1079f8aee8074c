"""What a run is: the settings that every worker must share, and that decide its bits."""

from __future__ import annotations

from dataclasses import MISSING, asdict, dataclass, fields

from holdfast.core.errors import ConfigError
from holdfast.core.options.run import AUDIT_EVERY_MAX, ON, REBALANCE
from holdfast.core.setting_words import setting_words
from holdfast.core.words import decode_json, encode_json

SHARDS_MAX = 4096
SEED_MAX = 1 << 63
NON_FINITE = ("stop", "ignore", "skip", "rewind")
CHANGEABLE = ("non_finite", "spike", "rebalance", "ranks")  # between two starts of a run, while nobody is in it
HANDED = "iterable"  # the order of samples of which only the iterable knows
PROCESS_GROUP = "process-group"
# gradients travel through one host's memory, also between hosts, over TCP alone, by a library of torch.distributed
PATHS = ("host", "hosts", "network", PROCESS_GROUP)


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """Frozen when the first worker joins. A later worker whose settings differ is told which."""

    batch_size: int
    shards: int
    seed: int = 0
    length: int  # of the dataset
    drop_last: bool = False
    shuffle: bool = True
    order_seed: int | None = None  # with a generator: its seed, which is that of the order of samples
    order: str = (
        ""  # the digest of the order of samples: with a sampler, of the first epoch's; of a stream and its files
    )
    batches: bool = False  # they come from a batch sampler, and `batch_size` is the largest of the first epoch
    threads: int = 1
    parameters: int  # how many numbers the model trains
    path: str = "host"  # see PATHS. It decides no bits, but how many rounds of messages a step takes
    ranks: int = 1  # a worker is a group of so many, which compute as many shards side by side; decides no bits
    outage_s: float = 0.0  # how long to train on without the ledger (0: for ever); see docs/decisions/0006
    checkpoint: str = ""  # where checkpoints are kept; empty: nowhere
    non_finite: str = "stop"  # see NON_FINITE
    spike: float = 0.0  # a loss that many times the usual is treated as one that is not finite; 0: none is
    rebalance: str = ON  # shards follow the workers' paces; all members must divide them alike
    audit: float = 0.0  # the fraction of shards that two workers compute
    audit_every: int = 0  # the members' states are compared once in so many steps; 0: never
    mode: str = ""  # in its own words, see modes/port.py; empty: the one of a run that asks for none

    def validate(self) -> RunConfig:
        for name in ("batch_size", "shards", "threads"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ConfigError(f"{name} is {value!r}", hint=f"{name} is a whole number of at least 1")
        if self.shards > SHARDS_MAX:
            raise ConfigError(f"shards is {self.shards}", hint=f"at most {SHARDS_MAX}; 8 to 64 is usual")
        if self.batch_size % self.shards and not self.batches:
            near = max(1, round(self.batch_size / self.shards)) * self.shards
            raise ConfigError(
                f"a batch of {self.batch_size} cannot be cut into {self.shards} equal shards",
                hint=f"make batch_size a multiple of shards, for example batch_size={near}",
            )
        if not isinstance(self.seed, int) or not -SEED_MAX <= self.seed < SEED_MAX:
            raise ConfigError(f"seed is {self.seed!r}", hint="a seed is a whole number from -2**63 to 2**63 - 1")
        if not isinstance(self.drop_last, bool):
            raise ConfigError(f"drop_last is {self.drop_last!r:.40}", hint="drop_last is True or False, as in PyTorch")
        if self.path not in PATHS:
            raise ConfigError(f"path is {self.path!r}", hint=f"path is one of {', '.join(map(repr, PATHS))}")
        if self.rebalance not in REBALANCE:
            raise ConfigError(f"rebalance is {self.rebalance!r}", hint=f"rebalance is {' or '.join(REBALANCE)}")
        if self.shards % self.ranks:
            raise ConfigError(
                f"{self.shards} shards cannot be dealt to groups of {self.ranks} ranks",
                hint=f"make shards a multiple of {self.ranks}, or give --ranks a power of two that divides them",
            )
        self._check_diverging()
        self._check_audits()
        return self

    @property
    def bundles(self) -> int:
        """What workers divide among themselves: shards, or so many of them as a group computes side by side."""
        return self.shards // self.ranks

    def _check_audits(self) -> None:
        if not 0 <= self.audit <= 1:
            raise ConfigError(f"audit is {self.audit!r}", hint="a fraction of the shards, from 0 (none) to 1 (all)")
        if not 0 <= self.audit_every <= AUDIT_EVERY_MAX:
            raise ConfigError(
                f"audit_every is {self.audit_every!r}", hint=f"steps, from 0 (never) to {AUDIT_EVERY_MAX}; 100 is usual"
            )

    def _check_diverging(self) -> None:
        if self.non_finite not in NON_FINITE:
            choices = ", ".join(map(repr, NON_FINITE))
            raise ConfigError(f"non_finite is {self.non_finite!r}", hint=f"non_finite is one of {choices}")
        if not isinstance(self.spike, int | float) or not (self.spike == 0 or 1 < self.spike < float("inf")):
            raise ConfigError(f"spike is {self.spike!r}", hint="how many times the usual loss is too much, such as 5.0")
        if self.spike and self.non_finite == "ignore":
            raise ConfigError("spike says what to look for, and non_finite='ignore' to ignore it", hint="leave out one")

    def encode(self) -> bytes:
        return encode_json(asdict(self))

    def check_same(self, data: bytes, *, may_differ: tuple[str, ...] = ()) -> bool:
        """ConfigError that names what is different from the run's own settings. Whether nothing is, else."""
        theirs = decode_json(data)
        for field in fields(self):
            if field.name not in theirs and field.default is MISSING:
                raise ConfigError(
                    f"the run's settings do not say its {field.name}: another version of Holdfast began it",
                    hint="go on with that version, or begin another run with another --run name",
                )
            mine, other = getattr(self, field.name), theirs.get(field.name, field.default)
            if mine != other and field.name == "order":
                raise ConfigError(
                    "this worker's sampler or stream gives another order of samples than the run's",
                    hint="all workers of a run need the same sampler, with the same weights and over the same data, or "
                    "the same stream over the same files",
                )
            if mine != other and field.name not in may_differ:
                raise ConfigError(
                    f"this worker has {setting_words(field.name, mine)}, but the run has "
                    f"{setting_words(field.name, other)}",
                    hint="all workers of a run need the same script and settings; use another --run name for others",
                )
        return all(getattr(self, name) == theirs.get(name, type(self).__dict__[name]) for name in may_differ)
