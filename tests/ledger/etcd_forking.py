"""A training script that forks loader processes while its ledger works:  python etcd_forking.py URL RUN

Exits with 0 if the loaders bring all their samples, the watch has missed nothing and the lease is alive.
"""

from __future__ import annotations

import os
import sys
import threading
from contextlib import closing
from typing import TYPE_CHECKING

import torch
from torch.utils.data import DataLoader, TensorDataset

from holdfast.core.errors import LedgerUnavailable
from holdfast.ledger.etcd import open_etcd

if TYPE_CHECKING:
    from holdfast.ledger.etcd.ledger import EtcdLedger
    from holdfast.ledger.etcd.watch import EtcdWatch

EPOCHS = 4


def main(url: str, run: str) -> None:
    stop = threading.Event()
    seen: list[int] = []
    with closing(open_etcd(url, run)) as ledger:
        lease = ledger.grant(2.0)
        watch = ledger.watch("", revision=ledger.put("start", b"", lease=lease))

        def follow() -> None:
            while not stop.is_set() or len(seen) < len(written):
                seen.extend(change.revision for change in watch.next(0.05))

        def renew() -> None:
            while not stop.wait(0.02):
                ledger.keep_alive(lease)

        written: list[int] = []
        threads = [threading.Thread(target=target) for target in (follow, renew)]
        for thread in threads:
            thread.start()
        data = TensorDataset(torch.arange(64.0))
        for epoch in range(EPOCHS):
            loader = DataLoader(data, batch_size=4, num_workers=2, multiprocessing_context="fork")
            assert sum(float(batch.sum()) for (batch,) in loader) == 2016.0
            written.append(ledger.put("epoch", b"%d" % epoch))
            clean_up_in_a_child(ledger, watch)
        stop.set()
        for thread in threads:
            thread.join(10.0)
            assert not thread.is_alive()
        assert seen == written, f"{seen} seen, {written} written"
        assert ledger.keep_alive(lease) >= 2.0
        ledger.revoke(lease)


def clean_up_in_a_child(ledger: EtcdLedger, watch: EtcdWatch) -> None:
    """What unwinds in a child must not wait for threads that are only in the parent, nor touch the parent's mark."""
    child = os.fork()
    if child == 0:
        try:
            watch.close()
            ledger.close()
            ledger.put("from the child", b"")
        except LedgerUnavailable:
            os._exit(7)
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7


if __name__ == "__main__":
    main(*sys.argv[1:])
