"""The options of `holdfast run` that say where, when and which checkpoints are kept."""

from __future__ import annotations

import argparse

from holdfast.checkpoint.settings import CheckpointSettings


def add_checkpoint_flags(run: argparse.ArgumentParser) -> None:
    default = CheckpointSettings()
    run.add_argument("--checkpoint", default="", metavar="URI", help="where checkpoints are kept (or: none)")
    run.add_argument("--save-every", default=default.every, metavar="N", help="500 (steps), 10min or auto (default)")
    run.add_argument("--keep", type=int, default=default.keep, metavar="K", help="the newest K stay (default: 3)")
    run.add_argument("--keep-every", type=int, default=0, metavar="N", help="and those of every N steps")
    run.add_argument("--keep-best", default="", metavar="METRIC:min", help="and the best one (loss:min, accuracy:max)")
    run.add_argument("--notice", type=float, default=default.notice_s, metavar="S", help="to save in, after SIGTERM")
    run.add_argument("--memory", default="", metavar="plain|K+M", help="copies in hosts' memory, whole or coded (4+2)")


def checkpoint_settings(options: argparse.Namespace) -> CheckpointSettings:
    return CheckpointSettings(
        uri=options.checkpoint,
        every=options.save_every,
        keep=options.keep,
        keep_every=options.keep_every,
        keep_best=options.keep_best,
        notice_s=options.notice,
        memory=options.memory,
    ).at_home()
