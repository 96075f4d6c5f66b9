"""A headless Chromium that a test drives by Selenium, where both are installed; else the test skips and says why."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

FLAGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
)
"""Flags that keep a browser from network accesses other than the page."""


@contextmanager
def browser(profile: Path, width: int = 1440, height: int = 900) -> Iterator[Any]:
    """A browser with a new profile in the empty folder `profile`, closed after the block."""
    webdriver = pytest.importorskip("selenium.webdriver", reason="Selenium is not installed")
    from selenium.webdriver.chrome.service import Service

    chromium, driver = shutil.which("chromium"), shutil.which("chromedriver")
    if chromium is None or driver is None:
        pytest.skip("Chromium and its driver are not installed")
    options = webdriver.ChromeOptions()
    options.binary_location = chromium
    for flag in (*FLAGS, f"--user-data-dir={profile}", f"--window-size={width},{height}"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    page = webdriver.Chrome(options=options, service=Service(driver))
    try:
        resize(page, width, height)
        yield page
    finally:
        page.quit()


def resize(page: Any, width: int, height: int = 900) -> None:
    """Set the size of pages, below the minimum size of a window as well."""
    size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
    page.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)


def complaints(page: Any) -> list[str]:
    """Return the messages of the page on the console."""
    return [entry["message"] for entry in page.get_log("browser")]
