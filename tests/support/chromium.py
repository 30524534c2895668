"""A real headless Chromium for tests of the page: Debian's, installed where it is missing."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
from collections.abc import Iterator

from playwright.sync_api import Browser, sync_playwright

_NAMES = ("chromium", "chromium-browser")
_INSTALL = (
    ("apt-get", "update"),
    ("apt-get", "install", "--yes", "--no-install-recommends", "chromium"),
)
_APT_OPTIONS = ("-o", "DPkg::Lock::Timeout=300")
_INSTALL_TIMEOUT_S = 900


def chromium_path() -> str:
    """Where Chromium is; installs Debian's package where there is none, which takes root."""
    return _found() or _installed()


@contextlib.contextmanager
def chromium() -> Iterator[Browser]:
    """Run Chromium without a window."""
    path = chromium_path()
    sandbox = [] if os.geteuid() else ["--no-sandbox"]  # root has no sandbox to offer it
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=path, args=["--disable-dev-shm-usage", *sandbox]
        )
        try:
            yield browser
        finally:
            browser.close()


def _found() -> str | None:
    return next(filter(None, map(shutil.which, _NAMES)), None)


def _installed() -> str:
    for command in _INSTALL:
        program, *arguments = command
        try:
            done = subprocess.run(
                [program, *_APT_OPTIONS, *arguments],
                capture_output=True,
                text=True,
                timeout=_INSTALL_TIMEOUT_S,
                env={**os.environ, "DEBIAN_FRONTEND": "noninteractive"},
            )
        except FileNotFoundError:
            raise AssertionError(f"{_HELP} Here is no apt-get.") from None
        if done.returncode:
            raise AssertionError(f"{_HELP} {' '.join(command)} failed:\n{done.stderr}")
    if (path := _found()) is None:
        raise AssertionError(f"{_HELP} Its package was installed, but brought no {_NAMES[0]}.")
    return path


_HELP = "Tests of the page need Chromium: install it, or run them as root on Debian."
