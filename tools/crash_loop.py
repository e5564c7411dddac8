"""Kill writers of a store at random moments, again and again, and check what is left each time.

::

    python tools/crash_loop.py --rounds 1000 --seed 7

Each round forks a child that adds, saves, loads and clears without pause and dies of SIGKILL, by
time or at a call to the disk. What is checked stands in ``tests/crash.py``, which the tests run for
fewer rounds. Ends with exit code 1 and the seed at the first loss; its directory is left then.
Needs Linux or macOS.
"""

import argparse
import random
import sys
import tempfile
import time
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))

import crash


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=None, help="drawn and printed if not given")
    parser.add_argument("--directory", type=Path, default=None, help="where the stores are made")
    arguments = parser.parse_args()
    seed = arguments.seed if arguments.seed is not None else random.SystemRandom().getrandbits(32)
    print(f"seed {seed}", flush=True)
    torch.set_num_threads(1)
    directory = Path(tempfile.mkdtemp(prefix="crash_loop_", dir=arguments.directory))
    begun = time.monotonic()
    try:
        summary = crash.run(directory, arguments.rounds, seed, is_loud=True)
    except AssertionError as error:
        sys.exit(f"crash_loop: {error}")
    directory.rmdir()
    print(f"{summary} {time.monotonic() - begun:.0f} s.")


if __name__ == "__main__":
    main()
