"""The run that serves batches: `holdfast run --horovod --workers 2 -m horovod.tensorflow.data.compute_worker FILE`."""

from __future__ import annotations

import argparse
from pathlib import Path

import holdfast.horovod.tensorflow as hvd
from holdfast.core.errors import ConfigError
from holdfast.horovod.meeting_place import MeetingPlace
from holdfast.horovod.tensorflow.data.compute_service import (
    SIDES,
    TfDataServiceConfig,
    compute_worker_fn,
)


def main(dispatchers: int, dispatcher_side: str, configfile: str, timeout: int) -> None:
    """All ranks call it, and come back when the training says that it is over."""
    hvd.init()
    if dispatchers < 1 or hvd.size() % dispatchers:
        raise ConfigError(
            f"{hvd.size()} workers cannot be shared out among {dispatchers} dispatchers",
            hint="let the number of workers be a multiple of --dispatchers",
        )
    config = TfDataServiceConfig(
        dispatchers=dispatchers,
        workers_per_dispatcher=hvd.size() // dispatchers,
        dispatcher_side=dispatcher_side,
        place=MeetingPlace.of_this_run(),
        timeout=timeout,
    )
    try:
        if hvd.rank() == 0:
            config.write(configfile)
        compute_worker_fn(config)
    finally:
        if hvd.rank() == 0:
            Path(configfile).unlink(missing_ok=True)  # the next training is not to find what is over


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("configfile", help="is written here, for the training to read")
    parser.add_argument("--dispatchers", type=int, default=1, help="how many (default: 1)")
    parser.add_argument("--dispatcher-side", choices=SIDES, default="compute", help="who starts them")
    parser.add_argument("--timeout", type=int, default=60, help="seconds for all to find each other (default: 60)")
    return parser.parse_args()


if __name__ == "__main__":
    options = parsed()
    main(options.dispatchers, options.dispatcher_side, options.configfile, options.timeout)
