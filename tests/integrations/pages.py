"""Scripts of cases, in processes of their own, and the complete examples of pages in docs/how-to, as they stand
there.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

PAGES = Path(__file__).parents[2] / "docs" / "how-to"


def run_examples(page: str, *, count: int) -> None:
    """Each Python block of the page is a script; the last line that it prints is the digest of the weights."""
    blocks = re.findall(r"^```python\n(.*?)^```", (PAGES / page).read_text(), re.MULTILINE | re.DOTALL)
    assert len(blocks) == count
    for block in blocks:
        said = io.StringIO()
        before = Path.cwd()
        with tempfile.TemporaryDirectory() as home, contextlib.redirect_stdout(said):
            os.chdir(home)
            try:
                exec(compile(block, page, "exec"), {"__name__": "__main__"})
            finally:
                os.chdir(before)
        assert re.fullmatch(r"[0-9a-f]{32}", said.getvalue().split()[-1]), said.getvalue()


def python(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", **variables}
    return subprocess.run(
        [sys.executable, *arguments], capture_output=True, text=True, timeout=580, env=environment, check=False
    )


def held_cases(script: Path, home: Path) -> None:
    """Every case of the script holds."""
    done = python(str(script), HF_HOME=str(home), HOME=str(home))
    assert done.returncode == 0, done.stderr[-4000:]
    expected = re.findall(r"^def (case_\w+)", script.read_text(), re.MULTILINE)
    assert re.findall(r"^held (\w+)", done.stdout, re.MULTILINE) == expected
