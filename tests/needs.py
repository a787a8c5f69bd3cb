"""What a test needs of its machine: without it a test is skipped with the reason, and fails where CI=true."""

from __future__ import annotations

import os
from typing import NoReturn

import pytest

from laga_core.experiments import netns


def unavailable(why: str) -> NoReturn:
    """Skip; in CI, fail."""
    if os.environ.get("CI") == "true":
        pytest.fail(why)
    pytest.skip(why)


@pytest.fixture(scope="session")
def namespaces() -> None:
    """Network namespaces that can be made here."""
    if reason := netns.unavailable():
        unavailable(reason)
