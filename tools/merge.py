"""Merge stores, checkpoints or RLinf's rank directories into one; the same as ``mmbuf merge``.

::

    python tools/merge.py run/rank_0 run/rank_1 merged
    python tools/merge.py run/rank_* merged --order appended --format arrow

Trajectories are numbered anew, interleaved by their ids unless they are to be appended. See
``--help`` for the rest.
"""

from mmbuf import cli

if __name__ == "__main__":
    cli.main("merge")
