"""The house: which module may import which, and who may touch the system.

The ranks are those of the table below: a module imports only from lower ones, so equal ranks
never meet. The package itself (``mmbuf/__init__.py``) ranks above all of its library, and the
command line above the package, which it uses as anybody else would.

``os``, ``mmap``, ``ctypes`` and ``resource`` belong to `files` and `vm`, so that a
test can put another disk in their place. Elsewhere ``os`` is allowed for what never touches the
disk: ``os.PathLike`` and ``os.fsdecode`` (a path as the caller gives it) and
``os.register_at_fork``. ``fcntl`` belongs to `files`; `channel` alone may use ``fcntl.ioctl`` (how
much of a socket is unread).
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

import mmbuf

ROOT = Path(mmbuf.__file__).parent

RANKS = {
    "terminal": -2,
    "arguments": -1,
    "errors": -1,
    "schema": 0,
    "columns": 1,
    "entry": 1,
    "text": 1,
    "notebook": 1,
    "packages": 1,
    "files": 1,
    "formats": 1,
    "roles": 1,
    "shield": 1,
    "vm": 1,
    "budget": 1,
    "formats.native": 2,
    "formats.arrow": 3,
    "forks": 2,
    "index": 2,
    "lane": 2,
    "locations": 2,
    "pool": 2,
    "slots": 2,
    "trajectory": 2,
    "formats.npy": 3,
    "adapters": 1,
    "adapters.nested": 2,
    "adapters.pt": 3,
    "adapters.pkl": 3,
    "storage": 4,
    "staging": 5,
    "batch": 4,
    "salvage": 3,
    "snapshot": 3,
    "sampling": 7,
    "sampling.draw": 3,
    "sampling.uniform": 4,
    "sampling.derived": 4,
    "sampling.tree": 3,
    "sampling.episodes": 5,
    "sampling.epoch": 4,
    "sampling.slices": 6,
    "sampling.nstep": 6,
    "sampling.prioritized": 5,
    "sampling.recency": 5,
    "sampling.stratified": 5,
    "places": 5,
    "cache": 6,
    "window": 7,
    "writer": 7,
    "checkpoint": 8,
    "buffer": 9,
    "doctor": 9,
    "health": 9,
    "transfer": 9,
    "stores": 9,
    "reader": 10,
    "dataset": 11,
    "analysis.table": 2,
    "analysis.rows": 5,
    "analysis.episodes": 6,
    "analysis.tables": 10,
    "analysis.summary": 11,
    "analysis": 12,
    "exchange": 1,
    "exchange.target": 11,
    "exchange.parquet": 12,
    "exchange.hf": 12,
    "exchange.episodes": 12,
    "exchange.layouts": 3,
    "exchange.hdf5": 13,
    "exchange.minari": 13,
    "rlinf": 12,
    "ray.wire": 3,
    "ray.shard": 10,
    "ray.actors": 11,
    "ray.remote": 11,
    "ray.shards": 12,
    "ray.buffer": 13,
    "ray.tables": 13,
    "ray": 14,
    "channel": 10,
    "collect": 10,
    "": 12,
    "cli.health": 14,
    "cli.returns": 13,
    "cli.sac": 13,
    "cli.progress": 13,
    "cli.screen": 13,
    "cli.damage": 13,
    "cli.inspect": 14,
    "cli.sql": 14,
    "cli.plot": 14,
    "cli.watch": 14,
    "cli.transfer": 14,
    "cli.exchange": 14,
    "cli.demo": 14,
    "cli": 15,
    "__main__": 16,
}

CORE = {"numpy", "pyarrow", "torch"}
OPTIONAL = {
    *("typer", "rich", "gymnasium", "matplotlib", "duckdb", "polars", "pandas", "ray"),
    "tensordict",
}
VAGUE = {"utils", "util", "common", "core", "base", "manager", "helper", "helpers", "misc"}

DOORS = {
    "os": {"files", "vm"},
    "mmap": {"vm"},
    "ctypes": {"vm"},
    "resource": {"vm"},
    "fcntl": {"files"},
    "shutil": set(),
    "tempfile": set(),
    "pathlib": set(),
}
# What of these others may use, since it touches neither disk nor memory.
HARMLESS = {
    ("arguments", "os"): {"PathLike", "fsdecode"},
    ("buffer", "os"): {"PathLike"},
    ("doctor", "os"): {"PathLike"},
    ("health", "os"): {"PathLike"},
    ("reader", "os"): {"PathLike"},
    ("transfer", "os"): {"PathLike"},
    ("forks", "os"): {"register_at_fork"},
    ("shield", "os"): {"register_at_fork"},
    ("window", "os"): {"register_at_fork"},
    ("channel", "fcntl"): {"ioctl"},
}
OPENERS = {"files", "vm"}


def _name_of(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


TREES = {_name_of(path): ast.parse(path.read_text()) for path in sorted(ROOT.rglob("*.py"))}
LIBRARY = sorted(name for name in TREES if not name.startswith(("cli", "__main__")))


def _imports(tree: ast.AST) -> Iterator[str]:
    """Every dotted name that ``tree`` imports, ``from a import b`` as ``a.b``."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "a relative import"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def _own_imports(name: str) -> set[str]:
    """The modules of the package that ``name`` imports."""
    found = set()
    for dotted in _imports(TREES[name]):
        parts = dotted.split(".")
        if parts[0] == "mmbuf":
            inner = [".".join(parts[1:stop]) for stop in range(len(parts), 0, -1)]
            found.add(next(module for module in inner if module in TREES))
    return found


def _packages(tree: ast.AST) -> set[str]:
    return {dotted.split(".")[0] for dotted in _imports(tree)}


def test_every_module_has_a_rank_and_every_rank_a_module() -> None:
    assert set(RANKS) == set(TREES)


def test_a_module_imports_only_from_lower_ranks() -> None:
    upward = {
        (name, other)
        for name in TREES
        for other in _own_imports(name)
        if RANKS[other] >= RANKS[name]
    }
    assert upward == set()


def test_functions_import_only_optional_dependencies() -> None:
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef)
    packages = {
        (name, package)
        for name, tree in TREES.items()
        for node in ast.walk(tree)
        if isinstance(node, kinds)
        for package in _packages(node)
    }
    assert {(name, package) for name, package in packages if package not in OPTIONAL} == set()


def test_the_library_imports_only_the_core_dependencies() -> None:
    foreign = {(name, package) for name in LIBRARY for package in _packages(TREES[name])}
    own = sys.stdlib_module_names | CORE | {"mmbuf"}
    assert {pair for pair in foreign if pair[1] not in own} == {("batch", "tensordict")}


def _uses(name: str) -> Iterator[tuple[str, str]]:
    """What ``name`` takes from modules of `DOORS`, as (module, attribute)."""
    for node in ast.walk(TREES[name]):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in DOORS:
            yield from ((node.module or "", alias.name) for alias in node.names)
        elif isinstance(node, ast.Import):
            for alias in node.names:
                is_plain = alias.asname is None and "." not in alias.name
                if alias.name.split(".")[0] in DOORS and not is_plain:
                    yield alias.name.split(".")[0], "another name"
        elif (
            isinstance(node, ast.Attribute)
            and isinstance(node.value, ast.Name)
            and node.value.id in DOORS
        ):
            yield node.value.id, node.attr


def test_only_the_doors_touch_the_system() -> None:
    trespassers = {
        (name, f"{module}.{attribute}")
        for name in LIBRARY
        for module, attribute in _uses(name)
        if name not in DOORS[module] and attribute not in HARMLESS.get((name, module), set())
    }
    assert trespassers == set()


def _calls(name: str) -> list[str]:
    return [ast.unparse(node.func) for node in ast.walk(TREES[name]) if isinstance(node, ast.Call)]


def test_only_the_doors_open_files() -> None:
    assert {name for name in LIBRARY if "open" in _calls(name)} == OPENERS


def test_the_library_never_prints() -> None:
    loud = {"print", "sys.stdout.write", "sys.stderr.write"}
    assert {name for name in LIBRARY if loud & set(_calls(name))} == set()


def test_commands_print_only_what_was_made_printable() -> None:
    """By ``screen.say``; JSON escapes by itself."""
    printed = {
        (name, ast.unparse(node.args[0]) if node.args else "")
        for name in TREES
        if name.startswith("cli")
        for node in ast.walk(TREES[name])
        if isinstance(node, ast.Call) and ast.unparse(node.func) in ("print", "typer.echo")
    }
    assert {pair for pair in printed if not pair[1].startswith(("json.dumps(", "printable("))} == {
        ("cli", "f'mmbuf {mmbuf.__version__}'")
    }


def test_the_library_sets_no_global_random_state() -> None:
    own = {"np.random.SeedSequence", "np.random.default_rng"}
    calls = {(name, call) for name in LIBRARY for call in _calls(name)}
    foreign = {
        (name, call)
        for name, call in calls
        if (call.startswith(("np.random.", "random.")) and call not in own)
        or call.endswith(("manual_seed", "set_rng_state"))
    }
    assert foreign == set()


def test_every_module_has_a_docstring() -> None:
    assert {name for name, tree in TREES.items() if not ast.get_docstring(tree)} == set()


def test_no_module_has_a_name_that_says_nothing() -> None:
    assert {part for name in TREES for part in name.split(".")} & VAGUE == set()
