"""RayReplayBuffer: one store per node of a Ray cluster, sampled as one window.

A shard is a Ray actor with a `TrajectoryReplayBuffer` on the disk of its node. Ray places, restarts
and connects the shards; nothing else does. There is no other actor, so none that all depend on.

A handle knows of each shard which trajectories its window has and how many rows each: it asks now
and then, and every answer tells what is new (`RemoteShard`). It draws row numbers of the whole
window with its own generator, and each shard gives the rows that fall to it. So rows are uniform
over the window that is known, how many come from which shard is multinomial, no row of a batch says
by its place where it is from, and a batch depends on nothing but generator and window: not on the
order in which shards answer, nor on who reads the rows. A shard whose trajectories have changed
meanwhile says so; then all of the batch is drawn anew. On its own node a handle reads the files
through a `ReplayReader`, and asks the actor only for rows that are not in files yet.

``actors`` starts the shards and finds them, ``shard`` is one of them, ``remote`` is it as a handle
sees it, ``shards`` are all of these, ``wire`` how rows travel, ``buffer`` the handle, ``tables``
the analysis of stores on a cluster.

What is guaranteed:

- What `add_trajectories` returned from can be sampled: by this handle at once, by others after at
  most ``refresh_s``.
- After `flush` it survives the death of the actor, after ``flush(sync=True)`` power loss; as with
  one buffer, since each shard is one.
- An actor that dies is restarted by Ray on its node and opens its store again, with all that was in
  files by then. Until it answers, `sample` draws from the other shards (with a warning, and
  ``num_short_batches`` of `get_stats`), and `add_trajectories` goes to them. What concerns all
  shards (`flush`, `clear`, checkpoints) raises ShardError instead.
- A node that is gone for good is a ShardError of `sample`, with ``on_lost="shrink"`` a smaller
  window. Its disk keeps the store: a new ``RayReplayBuffer`` of that path goes on with it where the
  machine is back.
- No call hangs: each ends within ``timeout_s``, by TimeoutError where there is no answer.

What is not:

- Nothing is kept twice. Rows that a dead shard had in memory only are lost, and those of a node
  that does not come back.
- An add whose shard died before it answered is made again elsewhere; it may be there twice. What
  ended with TimeoutError may be done later.
- While a shard dies, restarts or is cleared, only batches with rows of it are drawn anew: for that
  moment it is drawn from less often than others.
- The window goes by the time of addition, and each node has a clock of its own.
- A checkpoint is not of one instant: shards that are added to while it is saved go on. One that is
  saved over an older one is a mix of both until the call returns.
- Which node is which machine goes by its address when a cluster is started again.
- A head node that dies takes the cluster along.
"""

from __future__ import annotations

from mmbuf.ray.buffer import RayReplayBuffer
from mmbuf.ray.remote import ShardError
from mmbuf.ray.tables import read_store

__all__ = ["RayReplayBuffer", "ShardError", "read_store"]
