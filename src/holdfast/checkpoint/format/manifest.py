"""The manifest: what a checkpoint is, in one JSON file whose appearance is the commit.

It holds its own digest, the packed tree, the spec of every tensor, and the name and size of every part. Names and
layout are not taken from it but computed again, so a manifest cannot contradict itself: it describes what was written,
or it is an IntegrityError. Reading one takes no more memory than its own length allows. Owns nothing.
"""

from __future__ import annotations

import json
import math
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import xxhash

from holdfast.checkpoint.format.parts import FORMAT, PART_BYTES, Part, lay_out, number_of, tensor_names, unmarked
from holdfast.checkpoint.storage.port import Stored
from holdfast.core.errors import ConfigError, IntegrityError, ProtocolError
from holdfast.state.layout import TensorSpec

MANIFEST_BYTES_MAX = 64 * 2**20
STEP_MAX = 10**12 - 1
MANIFEST = "manifest.json"
_DIRECTORY = re.compile(r"checkpoint-(\d{12})(?:/.*)?", re.DOTALL)
_DIGEST = re.compile(rb'\{"digest":"([0-9a-f]{32})",')
_UNUSUAL = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}


def directory_of(step: int) -> str:
    """`checkpoint-000000000120`, without a slash at its end."""
    if not 0 <= step <= STEP_MAX:
        raise ConfigError(f"there is no step {step}", hint=f"steps are numbers from 0 to {STEP_MAX}")
    return f"checkpoint-{step:012d}"


def step_of(name: str) -> int | None:
    """The step of a checkpoint's directory, or of anything in it; None if it is something else."""
    match = _DIRECTORY.fullmatch(name)
    return int(match[1]) if match else None


def manifest_name(step: int) -> str:
    return f"{directory_of(step)}/{MANIFEST}"


@dataclass(frozen=True, kw_only=True)
class Manifest:
    step: int
    run: str
    tree: bytes
    names: tuple[str, ...]  # of the tensors: what `tensor_names` says of the tree
    specs: tuple[TensorSpec, ...]
    parts: tuple[Stored, ...]  # names inside the directory
    config: Mapping[str, Any] = field(default_factory=dict)
    metrics: Mapping[str, float] = field(default_factory=dict)
    created_s: float = 0.0

    @cached_property
    def layout(self) -> tuple[Part, ...]:
        return tuple(lay_out(self.names, self.specs, self.step))

    @property
    def nbytes(self) -> int:
        """Of the parts' files."""
        return sum(stored.size for stored in self.parts)

    def path(self, part: Stored) -> str:
        return f"{directory_of(self.step)}/{part.name}"

    def same_state(self, other: Manifest) -> bool:
        """Whether both describe the same bytes of the same run; the time they were made does not count."""
        return self._bytes() == other._bytes()

    def _bytes(self) -> tuple[Any, ...]:
        parts = [(unmarked(part.name), part.size) for part in self.parts]
        return self.step, self.run, self.tree, self.specs, parts

    def encode(self) -> bytes:
        body = {
            "format": FORMAT,
            "step": self.step,
            "run": self.run,
            "created_s": self.created_s,
            "metrics": {name: _plain(value) for name, value in self.metrics.items()},
            "config": dict(self.config),
            "parts": [[part.name, part.size] for part in self.parts],
            "tensors": [spec.to_json() for spec in self.specs],
            "tree": self.tree.decode(),
        }
        data = json.dumps(body, separators=(",", ":"), allow_nan=False).encode()
        if len(data) > MANIFEST_BYTES_MAX - 64:
            raise ConfigError(
                f"the manifest of step {self.step} would have {len(data)} bytes, at most {MANIFEST_BYTES_MAX} are read",
                hint="keep fewer, larger tensors in the state",
            )
        return b'{"digest":"%s",' % xxhash.xxh3_128_hexdigest(data).encode() + data[1:]


def _plain(value: float) -> float | str:
    """JSON has no word for what is not finite."""
    value = float(value)
    return value if math.isfinite(value) else repr(value)


def decode(data: bytes) -> Manifest:
    """Reads what `encode` wrote; anything else, whoever wrote it, is an IntegrityError or a ProtocolError."""
    match = _DIGEST.match(data)
    body = b"{" + data[match.end() :] if match else b""
    if match is None or len(data) > MANIFEST_BYTES_MAX or xxhash.xxh3_128_hexdigest(body) != match[1].decode():
        raise IntegrityError("the manifest's bytes are not those that were written")
    try:
        fields = json.loads(body, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        raise ProtocolError(f"not a manifest: {body[:80]!r}") from error
    if not isinstance(fields, dict) or fields.get("format") != FORMAT:
        raise ProtocolError(f"a manifest of another format than {FORMAT}")
    manifest = Manifest(
        step=_whole(fields, "step", STEP_MAX),
        run=_text(fields, "run"),
        created_s=_time(fields),
        metrics=_metrics(fields),
        config=_kind(fields, "config", dict),
        specs=tuple(TensorSpec.from_json(spec) for spec in _kind(fields, "tensors", list)),
        parts=tuple(_stored(part) for part in _kind(fields, "parts", list)),
        tree=_text(fields, "tree").encode("utf-8", "surrogatepass"),
        names=(),
    )
    return _consistent(manifest)


def _consistent(manifest: Manifest) -> Manifest:
    # First: the layout of sizes that nobody stored would itself be huge.
    if sum(spec.nbytes for spec in manifest.specs) > len(manifest.parts) * PART_BYTES:
        raise ProtocolError(f"a manifest with tensors larger than its {len(manifest.parts)} parts")
    names = tensor_names(manifest.tree, len(manifest.specs))
    manifest = Manifest(**{**_fields(manifest), "names": tuple(names)})
    sizes = [(part.number, part.size) for part in manifest.layout]
    if sizes != [(number_of(stored.name), stored.size) for stored in manifest.parts]:
        raise ProtocolError("a manifest whose parts are not those of its tensors")
    return manifest


def _fields(manifest: Manifest) -> dict[str, Any]:
    return {name: getattr(manifest, name) for name in Manifest.__dataclass_fields__}


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


def _kind(fields: dict[str, Any], name: str, kind: type) -> Any:
    value = fields.get(name)
    if type(value) is not kind:
        raise ProtocolError(f"a manifest whose {name} is {value!r:.80}")
    return value


def _whole(fields: dict[str, Any], name: str, limit: int) -> int:
    value = fields.get(name)
    if type(value) is not int or not 0 <= value <= limit:
        raise ProtocolError(f"a manifest whose {name} is {value!r:.80}")
    return value


def _text(fields: dict[str, Any], name: str) -> str:
    return str(_kind(fields, name, str))


def _time(fields: dict[str, Any]) -> float:
    value: Any = fields.get("created_s")
    if type(value) not in (int, float) or not 0 <= value < 2**53:
        raise ProtocolError(f"a manifest whose created_s is {value!r:.80}")
    return float(value)


def _metrics(fields: dict[str, Any]) -> dict[str, float]:
    metrics: dict[str, float] = {}
    for name, value in _kind(fields, "metrics", dict).items():
        if type(value) is str and value in _UNUSUAL:
            metrics[name] = _UNUSUAL[value]
        elif type(value) in (int, float) and abs(value) <= sys.float_info.max:
            metrics[name] = float(value)
        else:
            raise ProtocolError(f"a manifest whose metric {name:.40} is {value!r:.80}")
    return metrics


def _stored(value: Any) -> Stored:
    if not isinstance(value, list) or len(value) != 2 or type(value[0]) is not str or type(value[1]) is not int:
        raise ProtocolError(f"a manifest with the part {value!r:.80}")
    return Stored(value[0], value[1])
