"""What a run is: the settings that every worker must share, and that decide its bits."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields

from holdfast.core.errors import ConfigError
from holdfast.core.words import decode_json, encode_json

SHARDS_MAX = 4096
AUDIT_EVERY_MAX = 1_000_000
SEED_MAX = 1 << 63
LAST = ("drop", "pad")
NUMERICS = ("refuse", "warn")
NON_FINITE = ("stop", "ignore", "skip", "rewind")
CHANGEABLE = ("non_finite", "spike")  # between two starts of a run, while nobody is in it
ELASTIC = "elastic"
MODES = ("exact", ELASTIC)
PATHS = ("host", "hosts", "network")  # gradients travel through one host's memory, also between hosts, over TCP alone


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """Frozen when the first worker joins. A later worker whose settings differ is told which."""

    batch: int
    shards: int
    seed: int = 0
    length: int  # of the dataset
    last: str = "drop"
    shuffle: bool = True
    threads: int = 1
    parameters: int  # how many numbers the model trains
    path: str = "host"  # see PATHS. It decides no bits, but how many rounds of messages a step takes
    outage_s: float = 0.0  # how long to train on without the ledger (0: for ever); see docs/decisions/0006
    checkpoint: str = ""  # where checkpoints are kept; empty: nowhere
    non_finite: str = "stop"  # see NON_FINITE
    spike: float = 0.0  # a loss that many times the usual is treated as one that is not finite; 0: none is
    audit: float = 0.0  # the fraction of shards that two workers compute
    audit_every: int = 0  # the members' states are compared once in so many steps; 0: never
    mode: str = "exact"  # see MODES
    quorum: int = 0  # elastic: a step waits for so many workers with shards; 0: for all

    def validate(self) -> RunConfig:
        for name in ("batch", "shards", "threads"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ConfigError(f"{name} is {value!r}", hint=f"{name} is a whole number of at least 1")
        if self.shards > SHARDS_MAX:
            raise ConfigError(f"shards is {self.shards}", hint=f"at most {SHARDS_MAX}; 8 to 64 is usual")
        if self.batch % self.shards:
            near = max(1, round(self.batch / self.shards)) * self.shards
            raise ConfigError(
                f"a batch of {self.batch} cannot be cut into {self.shards} equal shards",
                hint=f"make batch a multiple of shards, for example batch={near}",
            )
        if not isinstance(self.seed, int) or not -SEED_MAX <= self.seed < SEED_MAX:
            raise ConfigError(f"seed is {self.seed!r}", hint="a seed is a whole number of at most 64 bits")
        if self.last not in LAST:
            raise ConfigError(f"last is {self.last!r}", hint="last is 'drop' or 'pad'")
        if self.path not in PATHS:
            raise ConfigError(f"path is {self.path!r}", hint=f"path is one of {', '.join(map(repr, PATHS))}")
        self._check_diverging()
        self._check_audits()
        self._check_mode()
        return self

    def _check_mode(self) -> None:
        if self.mode not in MODES:
            raise ConfigError(f"mode is {self.mode!r}", hint=f"mode is one of {', '.join(map(repr, MODES))}")
        if not isinstance(self.quorum, int) or isinstance(self.quorum, bool) or self.quorum < 0:
            raise ConfigError(f"quorum is {self.quorum!r}", hint="how many workers a step waits for, at least 1")
        if self.quorum and self.mode != ELASTIC:
            raise ConfigError(
                f"quorum={self.quorum} leaves out the work of slow workers, and mode={self.mode!r} never does",
                hint="join(mode='elastic', quorum=K), or leave out quorum",
            )
        if self.mode == ELASTIC and self.non_finite == "rewind":
            raise ConfigError(
                "non_finite='rewind' passes steps by their number, and in elastic mode that does not say which data",
                hint="join(mode='elastic', non_finite='skip') leaves out the update of such a step",
            )

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
            mine, other = getattr(self, field.name), theirs.get(field.name, field.default)
            if mine != other and field.name not in may_differ:
                raise ConfigError(
                    f"this worker has {field.name}={mine!r}, but the run has {field.name}={other!r}",
                    hint="all workers of a run need the same script and settings; use another --run name for others",
                )
        return all(getattr(self, name) == theirs.get(name, type(self).__dict__[name]) for name in may_differ)
