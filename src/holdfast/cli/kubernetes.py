"""`holdfast kubernetes manifest`, `containerfile` and `start`: a run's objects, its image, and what its pods start."""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from holdfast.core.durations import parse_duration
from holdfast.core.errors import ConfigError

HOSTS = 2
_NAME = re.compile(r"[a-z]([a-z0-9-]{0,38}[a-z0-9])?")  # of a service, with room for "-ledger-0"
_QUANTITY = re.compile(r"\d+(\.\d+)?(m|k|M|G|T|Ki|Mi|Gi|Ti)?")
START = ("kubernetes", "start")  # its words are those of `holdfast run`, which this parser does not know


def add_arguments(kubernetes: argparse.ArgumentParser, parser_class: Any) -> None:
    kubernetes.description = "Runs on Kubernetes: manifests, an image, and what a pod starts."
    actions = kubernetes.add_subparsers(metavar="ACTION", required=True, parser_class=parser_class)
    manifest = actions.add_parser("manifest", help="print the objects of a run, for kubectl apply")
    required = "--run NAME --image IMAGE --workers N --checkpoint URI"
    manifest.usage = f"holdfast kubernetes manifest {required} [options] script.py …"
    for flag, metavar, help in (
        ("--run", "NAME", "the run's name, and that of its objects"),
        ("--image", "IMAGE", "the image: `holdfast kubernetes containerfile` says how to make one"),
        ("--workers", "N", "how many workers each host has"),
        (
            "--checkpoint",
            "URI",
            "where checkpoints are kept, for all pods: s3://, gs://, az://, hdfs://",
        ),
    ):
        manifest.add_argument(flag, metavar=metavar, help=help, required=True)
    manifest.add_argument("--hosts", metavar="N", default=str(HOSTS), help=f"how many pods (default: {HOSTS})")
    manifest.add_argument("--spares", metavar="K", default="0", help="how many workers of each host wait")
    manifest.add_argument("--notice", metavar="T", default="25s", help="how long workers may save (default: 25s)")
    manifest.add_argument("--ledger", metavar="URL", default="", help="an etcd that is there (default: one of its own)")
    manifest.add_argument("--keys", metavar="DIR", help="put these keys into the manifest, as a secret")
    manifest.add_argument("--namespace", metavar="NAME", default="")
    manifest.add_argument("--secret", metavar="NAME", action="append", help="its entries become variables")
    manifest.add_argument("--cpu", metavar="Q", default="", help="of each host, as in 4 or 500m")
    manifest.add_argument("--memory", metavar="Q", default="", help="of each host, as in 16Gi")
    manifest.add_argument("--shared-memory", metavar="Q", default="2Gi", help="of each host's workers (default: 2Gi)")
    manifest.add_argument("-m", dest="module", nargs=argparse.REMAINDER, metavar="module", help="run a module")
    manifest.add_argument("script", nargs=argparse.REMAINDER, help="the script in the image, and its arguments")
    manifest.set_defaults(command=print_manifest)
    containerfile = actions.add_parser("containerfile", help="print how the image is made")
    containerfile.set_defaults(command=print_containerfile)
    actions.add_parser("start", help="what a pod starts: the words of `holdfast run`, the rest from its variables")


def print_manifest(options: argparse.Namespace) -> int:
    from holdfast.integrations.kubernetes.manifest import PodRun, objects_of, secret_command
    from holdfast.integrations.kubernetes.yaml_text import documents

    script = ("-m", *options.module) if options.module else tuple(options.script)
    if not script:
        raise ConfigError("there is nothing to run", hint="name the script as it is in the image: … train.py")
    if not _NAME.fullmatch(options.run):
        raise ConfigError(
            f"{options.run!r} cannot be the name of objects on Kubernetes",
            hint="use up to 40 small letters, digits and dashes, starting with a letter",
        )
    for flag in ("cpu", "memory", "shared_memory"):
        value = getattr(options, flag)
        if value and not _QUANTITY.fullmatch(value):
            raise ConfigError(f"--{flag.replace('_', '-')} {value} is no quantity", hint="for example 4, 500m or 16Gi")
    if options.checkpoint == "none":
        raise ConfigError(
            "a pod's own disk goes with it, and --checkpoint is none", hint="name a storage that all pods reach"
        )
    run = PodRun(
        name=options.run,
        image=options.image,
        script=script,
        hosts=_whole("--hosts", options.hosts, 1),
        workers=_whole("--workers", options.workers, 1),
        spares=_whole("--spares", options.spares, 0),
        checkpoint=options.checkpoint,
        notice_s=round(parse_duration("--notice", options.notice)),
        ledger=options.ledger,
        namespace=options.namespace,
        cpu=options.cpu,
        memory=options.memory,
        shared_memory=options.shared_memory,
        secrets=tuple(options.secret or ()),
        keys=_keys(options.keys),
    )
    if not run.keys:
        print(f"# before: holdfast keys create keys && {secret_command(run.keys_name)}")
    print(documents(objects_of(run)), end="")
    return 0


def print_containerfile(options: argparse.Namespace) -> int:
    from holdfast.integrations.kubernetes.containerfile import TEXT

    print(TEXT, end="")
    return 0


def start_of(arguments: Sequence[str]) -> argparse.Namespace | None:
    """`holdfast kubernetes start` and its words, if that is what they are."""
    if tuple(arguments[:2]) != START or "--help" in arguments[2:3]:
        return None

    def command(_: argparse.Namespace) -> NoReturn:
        from holdfast.integrations.kubernetes.pod import start

        start(arguments[2:])

    return argparse.Namespace(command=command)


def _whole(flag: str, word: str, least: int) -> int:
    if not word.isdecimal() or int(word) < least:
        hint = "see `holdfast kubernetes manifest --help`"
        raise ConfigError(f"{flag} is {word}, not a whole number from {least} on", hint=hint)
    return int(word)


def _keys(directory: str | None) -> dict[str, bytes]:
    if directory is None:
        return {}
    from holdfast.trust.keys import FILES, load_keys

    path = Path(directory).expanduser()
    load_keys(path)  # that they are in order
    return {name: (path / name).read_bytes() for name in FILES}
