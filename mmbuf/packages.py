"""Packages of the extras: imported when they are needed, through here."""

from __future__ import annotations

import importlib
from typing import Any

from mmbuf.errors import MmbufError


def optional_package(name: str, extra: str) -> Any:
    """The package, one of ``extra``; MmbufError that names the extra where it is not installed."""
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        raise MmbufError(
            f'{error.name} is missing. Install it: pip install "mmbuf[{extra}]"'
        ) from error
