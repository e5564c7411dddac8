"""Split a store, a checkpoint or a directory of RLinf's; the same as ``mmbuf split``.

::

    python tools/split.py store oldest --first 100
    python tools/split.py store shards --shards 8 --format arrow

``--first`` takes the oldest trajectories, ``--shards`` all of them, to ``shards/rank_0`` and so on.
See ``--help`` for the rest.
"""

from mmbuf import cli

if __name__ == "__main__":
    cli.main("split")
