"""Samplers: which rows a batch has.

`TrajectoryReplayBuffer.sample` and `ReplayReader.sample` take one of these; without one they draw
as `Uniform` does::

    buffer.sample(64, sampler=Slices(16))

====================  ===========================================================================
`Uniform`             rows, with replacement
`WithoutReplacement`  epochs: each row of the window once, in shuffled order
`Slices`              sequences of consecutive steps of one episode, ``[K, L, ...]``
`NStep`               rows with the discounted rewards of n steps, to bootstrap behind them
`Prioritized`         rows in proportion to priorities that the trainer updates
`Recent`              rows, the newer the more often
`FreshVersions`       rows whose policy version lags little behind the newest
`Stratified`          exact quotas of rows for each kind of trajectory
====================  ===========================================================================

Which columns are reward, flags of ends and next states is learned from their names, or said by
``roles=``: see `mmbuf.roles`.

A sampler belongs to the buffer or reader that it drew from first. All draw by the generator of
that one, so its state is the sampler's as well; what they remember beyond it (an epoch, priorities)
is in their own ``state_dict``. Any number of threads may draw.
"""

from mmbuf.sampling.draw import Draw, Sampler, Sight
from mmbuf.sampling.epoch import WithoutReplacement
from mmbuf.sampling.nstep import NStep
from mmbuf.sampling.prioritized import Prioritized
from mmbuf.sampling.recency import FreshVersions, Recent
from mmbuf.sampling.slices import Slices
from mmbuf.sampling.stratified import Stratified
from mmbuf.sampling.uniform import Uniform

__all__ = [
    "Draw",
    "FreshVersions",
    "NStep",
    "Prioritized",
    "Recent",
    "Sampler",
    "Sight",
    "Slices",
    "Stratified",
    "Uniform",
    "WithoutReplacement",
]
