"""`holdfast checkpoint ls`, `show`, `verify`, `export`, `import`, `prune`: checkpoints wherever they are kept.

What takes long shows how far it is, on a terminal.
"""

from __future__ import annotations

import argparse
import json
import math
import shutil
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from holdfast.cli.tables import age_words, aligned, size_words
from holdfast.core.errors import ConfigError, HoldfastError, IntegrityError, NotStored
from holdfast.core.setting_words import LABELS
from holdfast.events.telling import count

if TYPE_CHECKING:
    from holdfast.checkpoint.format.manifest import Manifest
    from holdfast.checkpoint.restoring.reading import Listed
    from holdfast.checkpoint.storage.port import Storage

_BAR_AFTER_S = 0.5
_BAR_PERIOD_S = 0.1
_BAR_WIDTH = 30
_CLEAR = "\r\x1b[2K"


def add_arguments(checkpoint: argparse.ArgumentParser, parser_class: Any) -> None:
    checkpoint.description = (
        "Checkpoints in a directory, s3://, gs://, az:// or hdfs://, or those of a run by its name."
    )
    actions = checkpoint.add_subparsers(metavar="ACTION", required=True, parser_class=parser_class)

    def action(name: str, help: str, command: Callable[[argparse.Namespace], int]) -> argparse.ArgumentParser:
        parser: argparse.ArgumentParser = actions.add_parser(name, help=help)
        parser.add_argument("uri", metavar="URI|RUN", help="where the checkpoints are, or the name of their run")
        parser.add_argument("--dir", metavar="DIR", help="where runs are kept (default: $HOLDFAST_DIR or ~/.holdfast)")
        parser.set_defaults(command=command)
        return parser

    ls = action("ls", "list them", list_all)
    show = action("show", "what is in one", show_one)
    verify = action("verify", "read everything of one and name what is damaged", verify_them)
    export = action("export", "write one as files of other programs", export_one)
    bring = action("import", "make one from files of other programs", import_one)
    action("release", "let the next run that comes have the place, with what is there", release_place)
    prune = action("prune", "delete those that are superseded, and what was never committed", prune_them)

    for parser in (show, verify, export):
        parser.add_argument("--step", type=int, metavar="N", help="which one (default: the newest)")
        parser.add_argument("--best", default="", metavar="METRIC:min|max", help="the best by a metric")
    for parser in (ls, show):
        parser.add_argument("--json", action="store_true", help="for programs")
    verify.add_argument("--all", action="store_true", help="all of them")
    export.add_argument("--to", required=True, metavar="PATH", help="a .safetensors or .pt file, or a directory")
    export.add_argument("--as", dest="kind", choices=("safetensors", "torch", "dcp"), help="the format")
    export.add_argument("--only", choices=("parameters",), help="the model's weights under its own names")
    bring.add_argument("--from", dest="source", required=True, metavar="PATH", help="what to read")
    bring.add_argument(
        "--step", type=int, metavar="N", help="its step (default: what it says, else one more than the newest)"
    )
    bring.add_argument("--run", default="", metavar="NAME", help="the run it is said to be of")
    prune.add_argument("--keep-last", type=int, required=True, metavar="K", help="keep the newest K")
    prune.add_argument("--keep-every", type=int, default=0, metavar="N", help="keep every step that N divides")
    prune.add_argument("--keep-best", default="", metavar="METRIC:min|max", help="keep the best by a metric")
    prune.add_argument("--dry-run", action="store_true", help="only say what would be deleted")


def list_all(options: argparse.Namespace) -> int:
    from holdfast.checkpoint.restoring.reading import list_checkpoints

    with _opened(options) as storage:
        rows = [_row(storage, entry) for entry in list_checkpoints(storage)]
    if options.json:
        print(json.dumps(rows, indent=1))
    elif not rows:
        print(f"no checkpoints in {storage.uri}")
    else:
        print("\n".join(_table(rows, now=time.time())))
    return 0


def show_one(options: argparse.Namespace) -> int:
    from holdfast.checkpoint.restoring.reading import read_manifest

    with _opened(options) as storage:
        manifest = read_manifest(storage, _chosen(storage, options.step, best=options.best))
    if options.json:
        print(json.dumps(_described(manifest), indent=1))
    else:
        print("\n".join(_described_lines(manifest, now=time.time())))
    return 0


def verify_them(options: argparse.Namespace) -> int:
    from holdfast.checkpoint.restoring.reading import list_checkpoints, verify

    if options.all and (options.step is not None or options.best):
        raise ConfigError("--all and --step or --best contradict each other", hint="leave one of them out")
    with _opened(options) as storage:
        newest = _chosen(storage, options.step, best=options.best)
        every = [entry.step for entry in list_checkpoints(storage) if entry.committed]
        damaged = 0
        for step in every if options.all else [newest]:
            with _bar(f"verifying step {step}") as progress:
                sentences = verify(storage, step, progress)
            print(f"step {step}: {'good' if not sentences else 'damaged'}")
            for sentence in sentences:
                print(f"  {sentence}")
            damaged += bool(sentences)
    return 1 if damaged else 0


def export_one(options: argparse.Namespace) -> int:
    from holdfast.checkpoint.converting.exporting import export, kind_of
    from holdfast.checkpoint.restoring.reading import read_manifest

    target = Path(options.to).expanduser()
    kind = kind_of(target, options.kind)
    with _opened(options) as storage:
        manifest = read_manifest(storage, _chosen(storage, options.step, best=options.best))
        with _bar(f"reading step {manifest.step}") as progress:
            export(storage, manifest, target, kind=kind, only_parameters=bool(options.only), progress=progress)
    print(f"wrote {options.only or 'all'} of step {manifest.step} to {target}")
    return 0


def import_one(options: argparse.Namespace) -> int:
    from holdfast.checkpoint.converting.importing import read_state_and_step
    from holdfast.checkpoint.library import save_to

    state, said = read_state_and_step(Path(options.source).expanduser())
    wanted = options.step if options.step is not None else said
    with _opened(options, may_be_new=True) as storage, _bar("writing") as progress:
        step = save_to(storage, state, step=wanted, run=options.run, progress=progress)
    unknown = "" if wanted is not None else "; the file does not say its step, and --step N does"
    print(f"made the checkpoint of step {step} from {options.source}{unknown}")
    return 0


def release_place(options: argparse.Namespace) -> int:
    from holdfast.checkpoint.format.owner import release

    with _opened(options) as storage:
        owner = release(storage)
    print(f"{storage.uri} belongs to no run" if owner is None else f"{storage.uri} no longer belongs to {owner.words}")
    return 0


def prune_them(options: argparse.Namespace) -> int:
    from holdfast.checkpoint.library import prune
    from holdfast.checkpoint.saving.retention import Keep

    keep = Keep(last=options.keep_last, every=options.keep_every, best=options.keep_best)
    keep.validate()
    with _opened(options) as storage:
        _chosen(storage, None)
        steps = prune(storage, keep, dry_run=options.dry_run)
    what = ", ".join(map(str, steps)) or "nothing"
    print(f"would delete {what}" if options.dry_run else f"deleted {what}")
    return 0


@contextmanager
def _opened(options: argparse.Namespace, *, may_be_new: bool = False) -> Iterator[Storage]:
    from holdfast.checkpoint.storage.opening import open_storage
    from holdfast.cli.places import place_of

    with closing(open_storage(place_of(options.uri, options.dir, may_be_new=may_be_new))) as storage:
        yield storage


def _chosen(storage: Storage, step: int | None, *, best: str = "") -> int:
    """The step that was asked for, the best by a metric, or the newest committed one. ConfigError if there is none."""
    from holdfast.checkpoint.restoring.reading import list_checkpoints

    steps = [entry.step for entry in list_checkpoints(storage) if entry.committed]
    if not steps:
        raise ConfigError(
            f"there is no checkpoint in {storage.uri}", hint="check the URI with `holdfast checkpoint ls`"
        )
    if step is not None and step not in steps:
        raise ConfigError(
            f"there is no checkpoint of step {step} in {storage.uri}", hint=f"the newest is that of step {steps[0]}"
        )
    if best:
        return _best(storage, steps, best, step)
    return steps[0] if step is None else step


def _best(storage: Storage, steps: list[int], criterion: str, step: int | None) -> int:
    from holdfast.checkpoint.restoring.reading import read_manifest
    from holdfast.checkpoint.saving.retention import Keep, best_of

    keep = Keep(best=criterion)
    keep.validate()
    if step is not None:
        raise ConfigError("--best and --step contradict each other", hint="leave one of them out")
    known: dict[int, Mapping[str, float]] = {}
    for one in steps:
        with suppress(IntegrityError, NotStored):
            known[one] = read_manifest(storage, one).metrics
    found = best_of(list(known.items()), keep)
    if found is None:
        names = sorted({name for metrics in known.values() for name in metrics})
        raise ConfigError(
            f"no checkpoint in {storage.uri} has the metric {keep.criterion()[0]!r}",
            hint=f"they have {', '.join(names)}" if names else "record one with run.record or step.record",
        )
    return found


# -- what is printed


def _row(storage: Storage, entry: Listed) -> dict[str, Any]:
    from holdfast.checkpoint.restoring.reading import read_manifest

    row: dict[str, Any] = {
        "step": entry.step,
        "bytes": entry.bytes,
        "created_s": None,
        "run": None,
        "metrics": {},
        "committed": entry.committed,
        "damage": None,
    }
    if entry.committed:
        try:
            manifest = read_manifest(storage, entry.step)
        except HoldfastError as error:
            row["damage"] = error.message
        else:
            row |= {"created_s": manifest.created_s, "run": manifest.run, "metrics": _finite(manifest.metrics)}
    return row


def _finite(metrics: Any) -> dict[str, float | str]:
    """JSON has no word for what is not finite."""
    return {name: value if math.isfinite(value) else repr(value) for name, value in metrics.items()}


def _table(rows: Iterable[dict[str, Any]], *, now: float) -> list[str]:
    lines = [("step", "size", "age", "run", "metrics", "")]
    for row in rows:
        state = "not committed" if not row["committed"] else "damaged manifest" if row["damage"] else "committed"
        age = "-" if row["created_s"] is None else age_words(now - row["created_s"])
        lines.append(
            (str(row["step"]), size_words(row["bytes"]), age, row["run"] or "-", _metrics(row["metrics"]), state)
        )
    return aligned(lines, right=2)


def _described(manifest: Manifest) -> dict[str, Any]:
    tensors = [
        {
            "name": name,
            "dtype": spec.to_json()[0],
            "shape": list(spec.shape),
            "order": list(spec.order) or None,
            "bytes": spec.nbytes,
        }
        for name, spec in zip(manifest.names, manifest.specs, strict=True)
    ]
    return {
        "step": manifest.step,
        "run": manifest.run,
        "created_s": manifest.created_s,
        "metrics": _finite(manifest.metrics),
        "config": dict(manifest.config),
        "bytes": manifest.nbytes,
        "parts": [{"name": part.name, "bytes": part.size} for part in manifest.parts],
        "tensors": tensors,
    }


def _described_lines(manifest: Manifest, *, now: float) -> Iterator[str]:
    about = _described(manifest)
    run = f" of run {manifest.run}" if manifest.run else ""
    yield (
        f"step {manifest.step}{run}, {age_words(now - manifest.created_s)} old, {size_words(manifest.nbytes)} "
        f"in {count(len(manifest.parts), 'part')}, {count(len(manifest.specs), 'tensor')}"
    )
    if manifest.metrics:
        yield f"metrics: {_metrics(about['metrics'])}"
    for name, value in sorted(manifest.config.items()):
        yield f"{LABELS.get(name, name)}: {(value or 'none') if isinstance(value, str) else json.dumps(value)}"
    rows = []
    for tensor in about["tensors"]:
        shape = "×".join(map(str, tensor["shape"])) or "scalar"
        rows.append((tensor["name"], tensor["dtype"], shape, size_words(tensor["bytes"])))
    yield from (f"  {line}" for line in aligned(rows, right=0))


def _metrics(metrics: dict[str, Any]) -> str:
    return " ".join(f"{name}={value if isinstance(value, str) else f'{value:.4g}'}" for name, value in metrics.items())


@contextmanager
def _bar(what: str, out: TextIO | None = None) -> Iterator[Callable[[int, int], None]]:
    """A line on a terminal that says how far it is, once it takes long; nothing elsewhere."""
    out = sys.stderr if out is None else out
    if not out.isatty():
        yield lambda done, total: None
        return
    begin = time.monotonic()
    due = begin + _BAR_AFTER_S

    def progress(done: int, total: int) -> None:
        nonlocal due
        now = time.monotonic()
        if now < due or not total:
            return
        due = now + _BAR_PERIOD_S
        full = _BAR_WIDTH * done // total
        rate = done / (now - begin)
        drawn = f"[{'#' * full}{'.' * (_BAR_WIDTH - full)}]"
        text = f"{what} {drawn} {size_words(done)} of {size_words(total)}, {size_words(rate)}/s"
        out.write(_CLEAR + text[: shutil.get_terminal_size().columns - 1])
        out.flush()

    try:
        yield progress
    finally:
        if due > begin + _BAR_AFTER_S:
            out.write(_CLEAR)
            out.flush()
