"""A real Chromium for tests of pages: Debian's, on this machine or fetched into the cache, with fonts for all scripts."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

from playwright.sync_api import Browser as Browser
from playwright.sync_api import Playwright, sync_playwright

from tests.support import debian

FLAGS = (
    *("--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync"),
    *("--disable-background-networking", "--disable-component-update", "--disable-dev-shm-usage"),
)
FONTS = ("fonts-dejavu-core", "fonts-wqy-microhei")
"""Latin, Greek, Cyrillic and Arabic; and Chinese, Japanese and Korean, in little room."""
_CONFIG = """<?xml version="1.0"?>
<!DOCTYPE fontconfig SYSTEM "urn:fontconfig:fonts.dtd">
<fontconfig>{folders}<cachedir>{cache}</cachedir>
<alias><family>sans-serif</family><prefer><family>DejaVu Sans</family></prefer></alias>
<alias><family>system-ui</family><prefer><family>DejaVu Sans</family></prefer></alias>
<alias><family>monospace</family><prefer><family>DejaVu Sans Mono</family></prefer></alias>
</fontconfig>
"""


@contextlib.contextmanager
def chromium(folder: Path) -> Iterator[Browser]:
    """Run a browser for the length of the block; `folder` is for its settings. RuntimeError if there is none to be had."""
    program = debian.program("chromium")
    folders = "".join(f"<dir>{debian.fonts(package)}</dir>" for package in FONTS)
    config = folder / "fonts.conf"
    config.write_text(_CONFIG.format(folders=folders, cache=debian.CACHE / "fontconfig"))
    with sync_playwright() as playwright:
        browser = _launched(playwright, program, {**os.environ, "FONTCONFIG_FILE": str(config), "HOME": str(folder)})
        try:
            yield browser
        finally:
            browser.close()


def _launched(playwright: Playwright, program: Path, environment: dict[str, str]) -> Browser:
    variables: dict[str, str | float | bool] = {**environment}
    return playwright.chromium.launch(executable_path=program, args=list(FLAGS), env=variables, headless=True)
