"""A replica that stands still costs the others nothing: what waits for it takes no room from what workers push."""

from __future__ import annotations

import os
import signal

import pytest
import torch

from holdfast.servers.port import initial_of, layout_of
from holdfast.servers.recipe import settings_of
from tests.harness.servers.direct_reads import read_directly
from tests.harness.servers.fleet import Fleet

pytestmark = [pytest.mark.processes, pytest.mark.xdist_group("parameter-servers")]
WAIT_S = 30.0
PUSHES = 60
LARGE = 5 << 18  # elements: a slice, and so an update, of 5 MiB, more than a log in memory keeps


@pytest.mark.parametrize("slices", [1, 8])
def test_pushes_of_large_slices_go_on_while_a_replica_stands_still(slices: int) -> None:
    """With several slices the bounds of all together are more than the room of a primary."""
    parameters = [torch.nn.Parameter(torch.zeros(LARGE)) for _ in range(slices)]
    optimizer = torch.optim.SGD(parameters, 1.0)
    layout = layout_of({f"slice{number}": one for number, one in enumerate(parameters)}, optimizer)
    gradients = [torch.full((LARGE,), -1.0) for _ in parameters]
    settings = [settings_of(group) for group in optimizer.param_groups]
    pushes = PUSHES // slices
    with Fleet(3, replicas=3, log_bytes_max=96 << 20) as fleet:
        worker = fleet.client("w0", slices=slices)
        worker.open(layout, initial_of([one.data for one in parameters]), timeout_s=WAIT_S)
        worker.join(0)
        configuration = fleet.configurations()["parameters/0"]
        silent = next(one for one in configuration.replicas if one != configuration.primary)
        os.kill(fleet.processes[silent], signal.SIGSTOP)
        for clock in range(1, pushes + 1):
            worker.push(gradients, settings, clock=clock).wait(WAIT_S)
        os.kill(fleet.processes[silent], signal.SIGCONT)
        fleet.wait_for(lambda: silent in fleet.registered(), f"{silent} is registered again")
        for number in range(slices):
            fleet.wait_for(
                lambda number=number: bool((read_directly(fleet, silent, number, fresh=False)[1] == pushes).all()),  # type: ignore[misc]
                f"{silent} has all updates of slice {number}",
            )
        worker.close()
