"""Where Chrome or Chromium is on this machine. As a script: prints the path, or exits 1."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
PLACES = (
    "/Applications/Google Chrome.app/Contents/MacOS/Google Chrome",
    "/Applications/Chromium.app/Contents/MacOS/Chromium",
)
FLAGS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-default-apps",
    "--disable-sync",
    "--no-first-run",
]


def find_browser() -> str | None:
    """Path of the browser: $BROWSER_PATH if set, else the first one found."""
    candidates = [os.environ.get("BROWSER_PATH"), *map(shutil.which, NAMES), *PLACES]
    return next((path for path in candidates if path and Path(path).is_file()), None)


if __name__ == "__main__":
    found = find_browser()
    print(found or "no Chrome or Chromium found")
    sys.exit(0 if found else 1)
