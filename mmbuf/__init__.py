"""mmbuf: a memory-mapped columnar storage engine for reinforcement-learning trajectories.

What is exported is imported when it is first asked for: the command can then be interrupted, and
say so in its own words, while all that it needs is still being imported.
"""

import importlib.util
import typing

if typing.TYPE_CHECKING:
    from mmbuf.buffer import TrajectoryReplayBuffer
    from mmbuf.channel import Channel
    from mmbuf.collect import TrajectoryCollector
    from mmbuf.dataset import PreloadReplayBufferDataset, ReplayBufferDataset
    from mmbuf.errors import (
        ClosedError,
        CorruptError,
        EmptyBufferError,
        LockedError,
        MmbufError,
        NoLocksError,
        SchemaError,
        VersionError,
        WriteError,
    )
    from mmbuf.reader import ReplayReader
    from mmbuf.trajectory import Trajectory

__version__ = "0.1.0"

__all__ = [
    "Channel",
    "ClosedError",
    "CorruptError",
    "EmptyBufferError",
    "LockedError",
    "MmbufError",
    "NoLocksError",
    "PreloadReplayBufferDataset",
    "ReplayBufferDataset",
    "ReplayReader",
    "SchemaError",
    "Trajectory",
    "TrajectoryCollector",
    "TrajectoryReplayBuffer",
    "VersionError",
    "WriteError",
]

_HOMES = {
    "Channel": "channel",
    "PreloadReplayBufferDataset": "dataset",
    "ReplayBufferDataset": "dataset",
    "ReplayReader": "reader",
    "Trajectory": "trajectory",
    "TrajectoryCollector": "collect",
    "TrajectoryReplayBuffer": "buffer",
}


def __getattr__(name: str) -> typing.Any:
    """An exported name, or a module of the package."""
    if name in __all__:
        home = importlib.import_module(f"{__name__}.{_HOMES.get(name, 'errors')}")
        return globals().setdefault(name, getattr(home, name))
    is_module_name = name.isidentifier() and not name.startswith("_")
    if is_module_name and importlib.util.find_spec(f"{__name__}.{name}") is not None:
        return importlib.import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
