"""How a group ends whose rank 0 is through: well only if all ranks have ended well."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

pytestmark = [pytest.mark.processes, pytest.mark.timeout(60)]
SCRIPT = """
import os, signal, sys
from holdfast.placement import ranks
ranks.END_TOGETHER_S = float(sys.argv[2])
gate, through = os.pipe()
ranks.fork()
here = ranks.ranks_here().rank
if here == int(sys.argv[1]):
    os.read(gate, 1)  # rank 0 is through
    exec(sys.argv[3])
come = ranks._come_to_their_ends
ranks._come_to_their_ends = lambda group: os.write(through, b"!") and come(group)
os._exit(0 if here else ranks.let_the_others_end(0))
"""


@pytest.mark.parametrize(
    ("does", "patience_s", "code", "says"),
    [
        ("pass", 30.0, 0, ""),
        ("os._exit(3)", 30.0, 3, "rank 2 of this group ended with exit code 3, and the group has failed with it"),
        ("os.kill(os.getpid(), signal.SIGKILL)", 30.0, 1, "rank 2 of this group was ended by signal 9"),
        ("signal.pause()", 0.2, 1, "rank 2 of this group has not come to its end"),
    ],
)
def test_a_group_ends_as_its_ranks_do(does: str, patience_s: float, code: int, says: str) -> None:
    command = [sys.executable, "-c", SCRIPT, "2", str(patience_s), does]
    ended = subprocess.run(
        command, env={**os.environ, "HOLDFAST_RANKS": "3"}, capture_output=True, text=True, timeout=40, check=False
    )
    assert (ended.returncode, says in ended.stderr) == (code, True), ended
