"""`holdfast keys create` and `holdfast keys show`. Neither ever prints a secret."""

from __future__ import annotations

import argparse
import shlex
import time
from pathlib import Path

from holdfast.trust.keys import Keys, create_keys, load_keys


def create(options: argparse.Namespace) -> int:
    path = Path(options.directory).expanduser().absolute()
    keys = create_keys(path)
    where, above = shlex.quote(str(path)), shlex.quote(f"{path.parent}/")
    print(f"made the keys of one run in {path}")
    _describe(keys)
    print(f"copy the directory to every host of the run:  scp -rp {where} HOST:{above}")
    print(f"and start each of them with:                  holdfast run --keys {where} ...")
    print("a copy of the keys is enough to join the run, to read its state and to stop it")
    return 0


def show(options: argparse.Namespace) -> int:
    path = Path(options.directory).expanduser().absolute()
    keys = load_keys(path)
    print(f"the keys in {path} are in order")
    _describe(keys)
    return 0


def _describe(keys: Keys) -> None:
    assert keys.expires is not None
    print(f"  fingerprint  {keys.fingerprint}")
    print(f"  valid until  {time.strftime('%Y-%m-%d', time.gmtime(keys.expires))}")
