"""The packages of the extra `exchange`, which are imported here and nowhere else."""

from __future__ import annotations

import importlib
from typing import Any

from mmbuf.errors import MmbufError


def optional_package(name: str) -> Any:
    """The package; MmbufError where it is not installed."""
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        raise MmbufError(
            f'{error.name} is missing. Install it: pip install "mmbuf[exchange]"'
        ) from error
