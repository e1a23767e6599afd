"""A real browser for tests of the status page, where one is installed."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
NAMES = ("chromium", "chromium-browser", "google-chrome", str(ROOT / ".venv" / "browser" / "chromium"))


@contextmanager
def open_browser() -> Iterator[Any]:
    """A headless Chromium; skips the test where there is none."""
    sync_api = pytest.importorskip("playwright.sync_api", reason="needs playwright. Run: pip install playwright")
    found = next(filter(None, map(shutil.which, NAMES)), None)
    if found is None:
        pytest.skip("needs a Chromium. Run: scripts/browser .venv/browser, or install the package chromium")
    with sync_api.sync_playwright() as playwright:
        # The sandbox needs rights that a container may not give; nothing but our own page is opened.
        opened = playwright.chromium.launch(executable_path=found, args=["--no-sandbox"])
        yield opened
        opened.close()


class Tab:
    """A page of its own, with everything that went wrong in it."""

    def __init__(self, browser: Any, width: int = 1280, scheme: str = "light") -> None:
        self.context = browser.new_context(viewport={"width": width, "height": 800}, color_scheme=scheme)
        self.page = self.context.new_page()
        self.problems: list[str] = []
        self.page.on("pageerror", lambda error: self.problems.append(str(error)))
        self.page.on("console", self._heard)

    def _heard(self, message: Any) -> None:
        if message.type in ("error", "warning"):
            self.problems.append(message.text)

    def text(self, selector: str) -> str:
        found: str = self.page.inner_text(selector)
        return found

    def until(self, selector: str, text: str) -> None:
        """Wait until an element has this text in it."""
        self.page.locator(selector).filter(has_text=text).first.wait_for(timeout=10_000)
