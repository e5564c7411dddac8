"""A store is a data set: its steps, episodes and trajectories as tables, for SQL and notebooks.

>>> tables = Tables("run/rank_*")
>>> tables.connect().sql("select env, avg(rewards) from steps group by env")
>>> tables.episodes.to_polars()

Read-only and without a lock, also while the stores are being written: the tables are those of the
moment in which they were opened.
"""

from mmbuf.analysis.summary import ColumnSummary, Spread, Summary, VersionSummary, summarize
from mmbuf.analysis.table import Table
from mmbuf.analysis.tables import Tables

__all__ = [
    "ColumnSummary",
    "Spread",
    "Summary",
    "Table",
    "Tables",
    "VersionSummary",
    "summarize",
]
