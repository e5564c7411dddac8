"""mmbuf: a memory-mapped columnar storage engine for reinforcement-learning trajectories."""

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
