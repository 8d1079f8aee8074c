"""A real browser that asks nobody but this host: Debian's chromium, driven by playwright."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

MISSING = "there is no chromium here: scripts/install_browser.sh gets one"
_FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)


def chromium() -> str | None:
    """Where it is: HOLDFAST_CHROMIUM, or on the path."""
    return os.environ.get("HOLDFAST_CHROMIUM") or shutil.which("chromium") or shutil.which("chromium-browser")


@contextmanager
def browsing(*flags: str) -> Iterator[Any]:
    """A browser of playwright's, until the end of the block."""
    from playwright.sync_api import sync_playwright

    arguments: Sequence[str] = (*_FLAGS, *flags)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium(), args=list(arguments))
        try:
            yield browser
        finally:
            browser.close()
