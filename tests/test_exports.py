"""What ``import mmbuf`` gives, and what it costs."""

from __future__ import annotations

import inspect
import json
import pickle
import re
import sys
from collections.abc import Iterator
from importlib import resources
from types import ModuleType

import pytest
from data import run_python

import mmbuf
from mmbuf import errors

OPTIONAL = ["typer", "rich", "gymnasium", "matplotlib", "duckdb", "polars", "pandas", "ray"]

PARENTS = {
    "SchemaError": ValueError,
    "EmptyBufferError": RuntimeError,
    "CorruptError": None,
    "VersionError": None,
    "LockedError": None,
    "NoLocksError": None,
    "WriteError": OSError,
    "ClosedError": ValueError,
}


def _public_members() -> Iterator[tuple[str, object]]:
    """Each exported class, and each function and property that its users can call."""
    for name in mmbuf.__all__:
        exported = getattr(mmbuf, name)
        yield name, exported
        for attribute, member in vars(exported).items():
            is_code = inspect.isfunction(member) or isinstance(
                member, (property, classmethod, staticmethod)
            )
            if is_code and not attribute.startswith("_"):
                yield f"{name}.{attribute}", member


def test_public_names_are_those_of_all() -> None:
    public = {
        name
        for name in dir(mmbuf)
        if not name.startswith("_") and not isinstance(getattr(mmbuf, name), ModuleType)
    }
    assert public == set(mmbuf.__all__)


def test_all_is_sorted_and_names_each_once() -> None:
    assert list(mmbuf.__all__) == sorted(set(mmbuf.__all__))


def test_there_are_about_a_dozen_public_names() -> None:
    assert 10 <= len(mmbuf.__all__) <= 16


def test_importing_prints_nothing_and_imports_nothing_optional() -> None:
    ran = run_python(
        "import json, sys; before = set(sys.modules); import mmbuf; "
        "sys.stderr.write(json.dumps(sorted(set(sys.modules) - before)))"
    )
    assert (ran.returncode, ran.stdout) == (0, "")
    imported = {name.split(".")[0] for name in json.loads(ran.stderr)}
    assert "mmbuf" in imported
    assert imported & set(OPTIONAL) == set()


def test_the_package_itself_imports_none_of_what_it_exports() -> None:
    ran = run_python(
        "import sys, mmbuf; assert not {'torch', 'numpy', 'pyarrow'} & set(sys.modules)\n"
        "assert mmbuf.sampling.NStep is __import__('mmbuf.sampling', fromlist=['x']).NStep\n"
        "from mmbuf import *\nassert Trajectory is mmbuf.Trajectory\n"
        "assert mmbuf.errors.SchemaError is SchemaError\n"
        "import pickle; assert pickle.loads(pickle.dumps(SchemaError)) is SchemaError"
    )
    assert (ran.returncode, ran.stderr) == (0, "")


@pytest.mark.parametrize("name", ["absent", "", "a.b", "errors.absent", "\0", "_absent"], ids=ascii)
def test_a_name_that_there_is_not_is_an_attribute_error(name: str) -> None:
    assert not hasattr(mmbuf, name)


def test_each_export_is_the_one_of_its_module() -> None:
    for name in mmbuf.__all__:
        exported = getattr(mmbuf, name)
        assert exported is getattr(sys.modules[exported.__module__], name)
        assert name in dir(mmbuf)
    with pytest.raises(AttributeError, match="module 'mmbuf' has no attribute 'Trajectori'"):
        _ = mmbuf.Trajectori
    assert not hasattr(mmbuf, "_private")


def test_what_is_public_has_a_docstring_of_its_own() -> None:
    docs = {name: member.__doc__ or "" for name, member in _public_members()}
    assert [name for name, doc in docs.items() if not doc.strip()] == []
    # The docstring that a dataclass makes only repeats the signature.
    assert [name for name, doc in docs.items() if doc.startswith(f"{name}(")] == []


@pytest.mark.parametrize("name", PARENTS)
def test_an_exception_has_the_parents_of_its_kind(name: str) -> None:
    error = getattr(mmbuf, name)
    builtin = PARENTS[name]
    assert error.__bases__ == (mmbuf.MmbufError, *([builtin] if builtin else []))


def test_every_exception_is_exported_and_below_the_one_base() -> None:
    found = {
        name
        for name, value in vars(errors).items()
        if inspect.isclass(value) and issubclass(value, BaseException)
    }
    assert found == {"MmbufError", *PARENTS}
    assert found <= set(mmbuf.__all__)
    assert mmbuf.MmbufError.__bases__ == (Exception,)


def test_the_tree_in_the_docstring_is_the_tree() -> None:
    drawn = re.findall(r"[├└]── (\w+) +(?:\((\w+)\))?", errors.__doc__ or "")
    assert dict(drawn) == {
        name: builtin.__name__ if builtin else "" for name, builtin in PARENTS.items()
    }


def test_an_error_about_bytes_says_where_they_are() -> None:
    error = mmbuf.CorruptError("/store/x.arrow", "bad magic.", offset=3)
    assert (str(error), error.path, error.offset) == (
        "/store/x.arrow at byte 3: bad magic.",
        "/store/x.arrow",
        3,
    )


def test_an_error_about_bytes_comes_whole_out_of_another_process() -> None:
    error = pickle.loads(pickle.dumps(mmbuf.CorruptError("/store/x.arrow", "bad magic.", offset=3)))
    assert (str(error), error.path, error.what, error.offset) == (
        *("/store/x.arrow at byte 3: bad magic.", "/store/x.arrow", "bad magic.", 3),
    )


def test_a_locked_error_names_the_holder_where_it_is_known() -> None:
    assert (mmbuf.LockedError("held").pid, mmbuf.LockedError("held").host) == (None, None)
    error = mmbuf.LockedError("held", pid=7, host="node")
    assert (str(error), error.pid, error.host) == ("held", 7, "node")


def test_the_package_says_that_it_is_typed() -> None:
    assert (resources.files("mmbuf") / "py.typed").is_file()


def test_the_version_is_a_release_number() -> None:
    assert re.fullmatch(r"\d+\.\d+\.\d+", mmbuf.__version__)
