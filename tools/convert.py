"""Convert a store, a checkpoint or a directory of RLinf's; the same as ``mmbuf convert``.

::

    python tools/convert.py rlinf_buffer store --format arrow
    python tools/convert.py store rlinf_buffer --format pt

See ``--help`` for the rest.
"""

from mmbuf import cli

if __name__ == "__main__":
    cli.main("convert")
