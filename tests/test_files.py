"""The door to the disk: names, whole writes, atomic replacement, locks; what a failure leaves."""

from __future__ import annotations

import errno
import fcntl
import gc
import json
import multiprocessing
import os
import shutil
import signal
import socket
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from children import Child, Parent
from hypothesis import given, settings
from hypothesis import strategies as st

import mmbuf
from mmbuf import files
from mmbuf.errors import CorruptError, LockedError, NoLocksError

FORK = multiprocessing.get_context("fork")


def no_space(*_: Any, **__: Any) -> Any:
    raise OSError(errno.ENOSPC, "No space left on device")


# -- names ---------------------------------------------------------------------------------------


def test_letters_digits_dashes_and_underscores_stay_as_they_are() -> None:
    assert files.escape("Weights-7_b") == "Weights-7_b"


def test_an_empty_text_stays_empty() -> None:
    assert files.escape("") == ""


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("a/b", "a%2fb"),
        ("..", "%2e%2e"),
        (".hidden", "%2ehidden"),
        ("a\\b", "a%5cb"),
        ("100%", "100%25"),
        ("a b", "a%20b"),
        ("é", "%c3a9"),
        ("日", "%e697a5"),
        ("\0\n", "%00%0a"),
    ],
)
def test_all_other_characters_become_their_bytes(text: str, name: str) -> None:
    assert files.escape(text) == name


def test_lone_surrogates_have_names_too() -> None:
    texts = ["\ud800", "\udc00", "?", "", "\ud800" * 100, "\udc00" * 100]
    names = [files.escape(text) for text in texts]
    assert len(set(names)) == len(texts)
    assert all(map(is_safe, names))


def is_safe(name: str) -> bool:
    return name.isascii() and not set(name) & set('/\\.\0 :*?"<>|') and len(name) <= 200


@settings(max_examples=300, deadline=None)
@given(st.lists(st.text(st.characters(exclude_categories=["Cs"])), min_size=2, unique=True))
def test_distinct_texts_have_distinct_safe_names(texts: list[str]) -> None:
    names = [files.escape(text) for text in texts]
    assert len(set(names)) == len(texts)
    assert all(map(is_safe, names))


@pytest.mark.parametrize("unit", ["a", "é", "/", "日本"])
def test_long_texts_have_bounded_distinct_names(unit: str) -> None:
    texts = [unit * count for count in (*range(190, 210), 1000, 100_000)]
    texts += [unit * 1000 + "x", "x" + unit * 1000]
    names = [files.escape(text) for text in texts]
    assert len(set(names)) == len(texts)
    assert all(map(is_safe, names))


def test_a_name_of_200_bytes_is_not_shortened() -> None:
    assert files.escape("a" * 200) == "a" * 200
    assert files.escape("a" * 201).startswith("a" * 167 + "%")


def test_the_longest_name_and_its_temporary_fit_a_file_system(tmp_path: Path) -> None:
    name = f"trajectory_{10**9}_{files.escape('é' * 1000)}.01234567.arrow"
    temporary = files.temporary(str(tmp_path / name))
    with files.created(temporary):
        pass
    files.rename(temporary, str(tmp_path / name))
    assert os.listdir(tmp_path) == [name]


def test_a_temporary_is_a_hidden_name_beside_that_no_other_call_gives(tmp_path: Path) -> None:
    path = str(tmp_path / "a.arrow")
    first, second = files.temporary(path), files.temporary(path)
    assert first != second
    assert os.path.dirname(first) == str(tmp_path)
    assert os.path.basename(first).startswith(".a.arrow.")
    assert first.endswith(".tmp")


def test_only_temporaries_are_removed(tmp_path: Path) -> None:
    others = [".notes.tmp", "..0123456789ab.tmp", "a.0123456789ab.tmp", ".a.0123456789AB.tmp"]
    keep = [".hidden", "tmp.notes", "a.arrow", ".writer.lock", ".cache.tmp", *others]
    (tmp_path / ".cache.tmp").mkdir()
    for name in set(keep) - {".cache.tmp"}:
        (tmp_path / name).write_bytes(b"")
    Path(files.temporary(str(tmp_path / "a.arrow"))).write_bytes(b"half")
    half = Path(files.temporary(str(tmp_path / "a\nb.npy")))
    half.mkdir()
    (half / "rewards.npy").write_bytes(b"half")
    files.remove_temporaries(str(tmp_path))
    assert sorted(os.listdir(tmp_path)) == sorted(keep)
    shutil.rmtree(tmp_path / ".cache.tmp")  # the check for leaks takes these for ours
    for name in others:
        (tmp_path / name).unlink()


def test_a_dangling_link_takes_a_name(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    assert files.exists(str(tmp_path / "link"))
    assert not files.exists(str(tmp_path / "nowhere"))


def test_to_unlink_what_is_not_there_is_fine(tmp_path: Path) -> None:
    files.unlink(str(tmp_path / "nowhere"))


def test_to_make_a_directory_that_is_there_is_fine(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "file").write_bytes(b"x")
    files.make_directory(str(tmp_path / "a"))
    files.make_directory(str(tmp_path / "b" / "c"))
    assert (tmp_path / "a" / "file").read_bytes() == b"x"
    assert files.is_directory(str(tmp_path / "b" / "c"))


# -- what is no file -----------------------------------------------------------------------------

NO_FILES: dict[str, Callable[[Path], object]] = {
    "a pipe": os.mkfifo,
    "a socket": lambda path: os.mknod(path, stat.S_IFSOCK | 0o600),
    "a device": lambda path: os.mknod(path, stat.S_IFCHR | 0o600, os.makedev(1, 3)),
    "a symbolic link": lambda path: path.symlink_to("/dev/null"),
    "a directory": lambda path: path.mkdir(),
}
by_kind = pytest.mark.parametrize("kind", NO_FILES)
# Those that take a directory of files as well are asked about one with something else in it.
OF_FILES = {
    "read": files.read,
    "opened": lambda path: files.opened(path).__enter__(),
    "opened_file": lambda path: files.opened_file(path).__enter__(),
    "open_for_append": files.open_for_append,
    "size_of_file": files.size_of_file,
    "is_locked": files.is_locked,
    "WriterLock": files.WriterLock,
}
OF_TRAJECTORIES = {
    "size_of": files.size_of,
    "disk_bytes_of": files.disk_bytes_of,
    "sync_whole": files.sync_whole,
    "link_or_copy": lambda path: files.link_or_copy(path, path + ".copy"),
}


def made_no_file(path: Path, kind: str) -> None:
    try:
        NO_FILES[kind](path)
    except PermissionError:
        pytest.skip("devices are for root to make")


def assert_refused(
    patch: pytest.MonkeyPatch, call: Callable[[str], object], path: Path, kind: str, named: Path
) -> None:
    """That it is a CorruptError about ``named``, and nothing was opened, not even for a moment."""
    really = os.open

    def checked(name: str, *arguments: Any) -> int:
        assert not os.path.lexists(name) or os.path.isdir(name) or os.path.isfile(name), name
        return really(name, *arguments)

    patch.setattr(os, "open", checked)
    before = sorted(path.parent.rglob("*"))
    with pytest.raises(CorruptError) as error:
        call(str(path))
    assert error.value.path == str(named)
    assert error.value.what == f"expected a file of the store's own, got {kind}."
    assert sorted(path.parent.rglob("*")) == before


@by_kind
@pytest.mark.parametrize("name", [*OF_FILES, *OF_TRAJECTORIES])
def test_what_is_no_file_is_not_opened_measured_or_linked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, kind: str
) -> None:
    path = tmp_path / "a"
    made_no_file(path, kind)
    if name in OF_TRAJECTORIES and kind == "a directory":
        pytest.skip("a trajectory may be a directory of files")
    assert_refused(monkeypatch, (OF_FILES | OF_TRAJECTORIES)[name], path, kind, path)


@by_kind
@pytest.mark.parametrize("name", OF_TRAJECTORIES)
def test_what_is_no_file_among_others_is_not_opened_measured_or_linked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, kind: str
) -> None:
    path = tmp_path / "a.npy"
    path.mkdir()
    (path / "b").write_bytes(b"b")
    made_no_file(path / "c", kind)
    assert_refused(monkeypatch, OF_TRAJECTORIES[name], path, kind, path / "c")


def test_a_pipe_that_takes_the_place_of_a_file_is_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    os.mkfifo(tmp_path / "a")
    file_status = os.lstat(__file__)
    monkeypatch.setattr(os, "lstat", lambda path: file_status)
    with pytest.raises(CorruptError, match="got a pipe"):
        files.read(str(tmp_path / "a"))


def test_a_link_to_the_same_file_is_not_the_same_file(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"a")
    (tmp_path / "link").symlink_to("a")
    os.link(tmp_path / "a", tmp_path / "b")
    assert files.is_same(str(tmp_path / "a"), str(tmp_path / "b"))
    assert not files.is_same(str(tmp_path / "a"), str(tmp_path / "link"))
    assert not files.is_same(str(tmp_path / "link"), str(tmp_path / "a"))


def test_a_link_to_the_same_directory_is_the_same_directory(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "link").symlink_to("a")
    assert files.is_same(str(tmp_path / "a"), str(tmp_path / "link"))


def test_names_in_a_directory_are_synced_through_a_link_to_it(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "link").symlink_to("a")
    files.sync(str(tmp_path / "link"))


# -- new files -----------------------------------------------------------------------------------


def test_a_created_file_holds_what_was_written(tmp_path: Path) -> None:
    path = tmp_path / "a"
    with files.created(str(path)) as fd:
        files.write_at(fd, b"world", 5)
        files.write_at(fd, b"hello", 0)
    assert path.read_bytes() == b"helloworld"


@pytest.mark.parametrize("failure", [OSError(28, "full"), ValueError("x"), KeyboardInterrupt()])
def test_a_created_file_is_removed_on_failure(tmp_path: Path, failure: BaseException) -> None:
    def fail() -> None:
        with files.created(str(tmp_path / "a")) as fd:
            files.write_at(fd, b"half", 0)
            raise failure

    with pytest.raises(type(failure)):
        fail()
    assert os.listdir(tmp_path) == []


def test_a_created_file_is_removed_when_its_close_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.close

    def close(fd: int) -> None:
        real(fd)
        raise OSError(errno.EIO, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(files.os, "close", close)
        with pytest.raises(OSError, match="Input/output"), files.created(str(tmp_path / "a")) as fd:
            files.write_at(fd, b"whole", 0)
    assert os.listdir(tmp_path) == []


def test_a_file_that_is_there_is_neither_taken_nor_removed(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"old")
    with pytest.raises(FileExistsError), files.created(str(tmp_path / "a")):
        pass
    assert (tmp_path / "a").read_bytes() == b"old"


# -- writes and reads ------------------------------------------------------------------------------


def test_a_write_in_pieces_is_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.pwrite
    with files.created(str(tmp_path / "a")) as fd, monkeypatch.context() as patch:
        patch.setattr(files.os, "pwrite", lambda fd, data, at: real(fd, data[:3], at))
        files.write_at(fd, bytes(range(100)), 7)
    assert (tmp_path / "a").read_bytes() == bytes(7) + bytes(range(100))


def test_a_write_takes_memory_of_any_item_size(tmp_path: Path) -> None:
    with files.created(str(tmp_path / "a")) as fd:
        files.write_at(fd, memoryview(b"abcdefgh").cast("I"), 0)
    assert (tmp_path / "a").read_bytes() == b"abcdefgh"


def test_a_read_in_pieces_is_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a").write_bytes(bytes(range(100)))
    pread, preadv = os.pread, os.preadv
    view = bytearray(50)
    with files.opened(str(tmp_path / "a")) as fd, monkeypatch.context() as patch:
        patch.setattr(files.os, "pread", lambda fd, size, at: pread(fd, min(size, 3), at))
        patch.setattr(files.os, "preadv", lambda fd, views, at: preadv(fd, [views[0][:3]], at))
        assert files.read_at(fd, 50, 10) == bytes(range(10, 60))
        files.read_into(fd, memoryview(view), 10)
    assert view == bytes(range(10, 60))


def test_read_at_gives_fewer_bytes_only_at_the_end(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"0123456789")
    with files.opened(str(tmp_path / "a")) as fd:
        assert files.read_at(fd, 100, 4) == b"456789"
        assert files.read_at(fd, 100, 10) == b""
        assert files.read_at(fd, 0, 3) == b""


@pytest.mark.parametrize(("offset", "end"), [(4, 10), (10, 10), (50, 50)])
def test_read_into_beyond_the_end_is_an_eof_error(tmp_path: Path, offset: int, end: int) -> None:
    (tmp_path / "a").write_bytes(b"0123456789")
    message = rf"^the file ends at byte {end}$"
    with files.opened(str(tmp_path / "a")) as fd, pytest.raises(EOFError, match=message):
        files.read_into(fd, memoryview(bytearray(7)), offset)


@pytest.mark.skipif(not hasattr(os, "posix_fallocate"), reason="needs posix_fallocate")
def test_allocated_space_is_taken_at_once(tmp_path: Path) -> None:
    with files.created(str(tmp_path / "a")) as fd:
        files.allocate(fd, 0, 0)
        assert files.length(fd) == 0
        files.allocate(fd, 1 << 20, 1 << 20)
        status = os.fstat(fd)
        assert status.st_size == 2 << 20
        assert 1 << 20 <= status.st_blocks * 512 < 2 << 20


# -- appending -------------------------------------------------------------------------------------


@pytest.fixture
def journal(tmp_path: Path) -> Iterator[int]:
    (tmp_path / "journal").write_bytes(b"first\n")
    fd = files.open_for_append(str(tmp_path / "journal"))
    yield fd
    files.close(fd)


def test_an_append_goes_to_the_end(tmp_path: Path, journal: int) -> None:
    files.append(journal, b"second\n")
    files.append(journal, b"third\n")
    assert (tmp_path / "journal").read_bytes() == b"first\nsecond\nthird\n"
    assert files.length(journal) == 19


def test_an_append_is_one_write(journal: int, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    real = os.write

    def write(fd: int, data: bytes) -> int:
        calls.append(data)
        return real(fd, data)

    with monkeypatch.context() as patch:
        patch.setattr(files.os, "write", write)
        files.append(journal, b"x" * 100_000)
    assert calls == [b"x" * 100_000]


def test_an_append_that_came_short_is_cut_off(
    tmp_path: Path, journal: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.write
    with monkeypatch.context() as patch:
        patch.setattr(files.os, "write", lambda fd, data: real(fd, data[:3]))
        with pytest.raises(OSError, match=r"only 3 of 7 bytes could be appended") as error:
            files.append(journal, b"second\n")
    assert error.value.errno == errno.ENOSPC
    assert (tmp_path / "journal").read_bytes() == b"first\n"
    files.append(journal, b"third\n")
    assert (tmp_path / "journal").read_bytes() == b"first\nthird\n"


def test_an_append_that_fails_leaves_the_file_as_it_was(
    tmp_path: Path, journal: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(files.os, "write", no_space)
        with pytest.raises(OSError, match="No space"):
            files.append(journal, b"second\n")
    assert (tmp_path / "journal").read_bytes() == b"first\n"


# -- replacing -------------------------------------------------------------------------------------


@pytest.mark.parametrize("old", [None, b"", b"old" * 1000])
def test_a_replaced_file_holds_the_new_blocks(tmp_path: Path, old: bytes | None) -> None:
    path = tmp_path / "a.json"
    if old is not None:
        path.write_bytes(old)
    files.replace(str(path), iter([b"new ", b"", b"content"]))
    assert path.read_bytes() == b"new content"
    assert os.listdir(tmp_path) == ["a.json"]


@pytest.mark.parametrize("call", ["open", "pwrite", "fsync", "rename"])
@pytest.mark.parametrize("old", [None, b"old"])
def test_a_failing_replace_leaves_the_old_file_and_no_temporary(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str, old: bytes | None
) -> None:
    path = tmp_path / "a.json"
    if old is not None:
        path.write_bytes(old)
    with monkeypatch.context() as patch:
        patch.setattr(files.os, call, no_space)
        with pytest.raises(OSError, match="No space"):
            files.replace(str(path), [b"new"])
    assert os.listdir(tmp_path) == ([] if old is None else ["a.json"])
    assert old is None or path.read_bytes() == old


def test_a_replace_whose_blocks_fail_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_bytes(b"old")

    def blocks() -> Iterator[bytes]:
        yield b"new"
        raise RuntimeError("no more")

    with pytest.raises(RuntimeError, match="no more"):
        files.replace(str(path), blocks())
    assert path.read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["a.json"]


def test_the_new_bytes_are_on_the_disk_before_they_take_the_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "a.json"
    path.write_bytes(b"old")
    seen: list[tuple[str, bytes]] = []

    def recorded(call: str) -> Callable[..., Any]:
        real = getattr(os, call)

        def function(*arguments: Any) -> Any:
            seen.append((call, path.read_bytes()))
            return real(*arguments)

        return function

    with monkeypatch.context() as patch:
        for call in ("pwrite", "fsync", "rename"):
            patch.setattr(files.os, call, recorded(call))
        files.replace(str(path), [b"new ", b"content"])
    assert seen == [("pwrite", b"old"), ("pwrite", b"old"), ("fsync", b"old"), ("rename", b"old")]
    assert path.read_bytes() == b"new content"


def test_files_and_directories_can_be_synced(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"x")
    files.sync(str(tmp_path / "a"))
    files.sync(str(tmp_path))


# -- the writer's lock -----------------------------------------------------------------------------


@pytest.fixture
def lock_path(tmp_path: Path) -> str:
    return str(tmp_path / ".writer.lock")


def assert_locked_by(path: str, pid: int) -> None:
    with pytest.raises(LockedError) as error:
        files.WriterLock(path)
    assert (error.value.pid, error.value.host) == (pid, socket.gethostname())
    who = f"process {pid} on {socket.gethostname()} holds the store"
    remedy = "Close that buffer, or read the store with ReplayReader."
    if pid == os.getpid():
        who += ": this very process, by a buffer that is still open"
        remedy = (
            "Call that buffer's close() first, or make it in a with block: a notebook's cell that "
            "is run again makes a second one while the first is there. One that has no name any "
            "more may be kept by the last error's traceback."
        )
    where = os.path.dirname(path)
    assert str(error.value) == f"{where}: expected no other writer, but {who}. {remedy}"


def test_a_second_lock_in_this_process_is_refused(lock_path: str) -> None:
    lock = files.WriterLock(lock_path)
    assert_locked_by(lock_path, os.getpid())
    assert_locked_by(lock_path, os.getpid())
    lock.release()


def test_a_released_lock_can_be_taken_again(lock_path: str) -> None:
    files.WriterLock(lock_path).release()
    second = files.WriterLock(lock_path)
    assert_locked_by(lock_path, os.getpid())
    second.release()


def test_the_lock_file_says_who_holds_it(lock_path: str) -> None:
    Path(lock_path).write_text("x" * 1000)
    lock = files.WriterLock(lock_path)
    holder = json.loads(Path(lock_path).read_text())
    assert holder == {"pid": os.getpid(), "host": socket.gethostname()}
    lock.release()


@pytest.mark.parametrize("said", ["", "{", "[]", "{}", '{"pid": null}', '{"pid": "x", "host": 1}'])
def test_a_holder_that_did_not_say_its_name_is_refused_all_the_same(
    lock_path: str, said: str
) -> None:
    lock = files.WriterLock(lock_path)
    Path(lock_path).write_text(said)
    with pytest.raises(LockedError, match="a process that has not yet said its name") as error:
        files.WriterLock(lock_path)
    assert (error.value.pid, error.value.host) == (None, None)
    lock.release()


@pytest.mark.parametrize(
    "said", ["[" * 200_000, '{"pid":' * 100_000, "9" * 10_000, '{"pid": 1e999, "host": ""}']
)
def test_a_lock_file_of_no_sense_names_no_holder(lock_path: str, said: str) -> None:
    Path(lock_path).write_text(said)
    assert files.last_holder(lock_path) is None


def _try_to_lock(path: str, answers: Any) -> None:
    try:
        files.WriterLock(path).release()
    except LockedError as error:
        answers.put((error.pid, error.host))
    else:
        answers.put(None)


def test_a_lock_in_a_forked_child_is_refused_while_we_hold_it(lock_path: str) -> None:
    lock = files.WriterLock(lock_path)
    answers = FORK.SimpleQueue()
    for expected in ((os.getpid(), socket.gethostname()), None):
        child = FORK.Process(target=_try_to_lock, args=(lock_path, answers))
        child.start()
        assert answers.get() == expected
        child.join(20)
        assert child.exitcode == 0
        lock.release()
    answers.close()


def _forget(locks: list[files.WriterLock]) -> None:
    locks.clear()
    gc.collect()


def test_a_forked_child_that_forgets_the_lock_does_not_release_ours(lock_path: str) -> None:
    locks = [files.WriterLock(lock_path)]
    child = FORK.Process(target=_forget, args=(locks,))
    child.start()
    child.join(20)
    assert child.exitcode == 0
    assert_locked_by(lock_path, os.getpid())
    locks[0].release()


def _wait(is_ready: Any, may_end: Any) -> None:
    is_ready.set()
    may_end.wait(20)


def test_a_released_lock_is_free_though_a_forked_child_lives(lock_path: str) -> None:
    lock = files.WriterLock(lock_path)
    is_ready, may_end = FORK.Event(), FORK.Event()
    child = FORK.Process(target=_wait, args=(is_ready, may_end))
    child.start()
    assert is_ready.wait(20)
    lock.release()
    files.WriterLock(lock_path).release()
    may_end.set()
    child.join(20)
    assert child.exitcode == 0


def test_a_lock_dies_with_its_process(lock_path: str) -> None:
    script = (
        "import sys, time\n"
        "from mmbuf.files import WriterLock\n"
        "lock = WriterLock(sys.argv[1])\n"
        "print('locked', flush=True)\n"
        "time.sleep(60)\n"
    )
    root = str(Path(mmbuf.__file__).parent.parent)
    with subprocess.Popen(
        [sys.executable, "-c", script, lock_path],
        env={**os.environ, "PYTHONPATH": root},
        stdout=subprocess.PIPE,
        text=True,
    ) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == "locked\n"
        assert_locked_by(lock_path, child.pid)
        child.send_signal(signal.SIGKILL)
        child.wait(20)
    lock = files.WriterLock(lock_path)
    assert json.loads(Path(lock_path).read_text())["pid"] == os.getpid()
    lock.release()


# -- a lock's file with other names, or without its own --------------------------------------------


def test_a_lock_file_that_is_linked_from_outside_is_not_written_to(
    tmp_path: Path, lock_path: str
) -> None:
    (tmp_path / "precious").write_bytes(b"precious")
    os.link(tmp_path / "precious", lock_path)
    lock = files.WriterLock(lock_path)
    assert (tmp_path / "precious").read_bytes() == b"precious"
    assert json.loads(Path(lock_path).read_text())["pid"] == os.getpid()
    assert os.stat(lock_path).st_nlink == 1
    assert_locked_by(lock_path, os.getpid())
    lock.release()
    assert sorted(os.listdir(tmp_path)) == [".writer.lock", "precious"]


def test_two_stores_that_share_a_lock_file_are_both_locked(tmp_path: Path) -> None:
    paths = [str(tmp_path / name) for name in "ab"]
    files.WriterLock(paths[0]).release()
    os.link(*paths)
    locks = [files.WriterLock(path) for path in paths]
    for path in paths:
        assert_locked_by(path, os.getpid())
    for lock in locks:
        lock.release()


def test_a_lock_file_that_is_linked_while_it_is_locked_is_made_our_own(
    tmp_path: Path, lock_path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "_PATIENCE_S", 0)
    other = str(tmp_path / "other.lock")
    lock = files.WriterLock(lock_path)
    os.link(lock_path, other)
    with pytest.raises(LockedError, match=r"other\.lock has more than one name"):
        files.WriterLock(other)
    lock.hold()
    copy = files.WriterLock(other)
    for path in (lock_path, other):
        assert_locked_by(path, os.getpid())
        assert os.stat(path).st_nlink == 1
    lock.hold()
    copy.hold()
    for path in (lock_path, other):
        assert_locked_by(path, os.getpid())
    copy.release()
    lock.release()


def test_a_store_whose_lock_file_is_shared_is_waited_for_a_moment(
    tmp_path: Path, lock_path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    lock = files.WriterLock(lock_path)
    os.link(lock_path, tmp_path / "other")
    monkeypatch.setattr(time, "sleep", lambda _: lock.hold())  # what its next add does
    files.WriterLock(str(tmp_path / "other")).release()
    lock.release()


def test_a_lock_file_that_was_removed_is_made_anew(lock_path: str) -> None:
    lock = files.WriterLock(lock_path)
    os.unlink(lock_path)
    lock.hold()
    assert_locked_by(lock_path, os.getpid())
    lock.release()
    files.WriterLock(lock_path).release()


@pytest.mark.parametrize("how", ["removed", "replaced"])
def test_a_lock_that_another_has_got_is_lost_until_that_one_lets_go(
    tmp_path: Path, lock_path: str, how: str
) -> None:
    lock = files.WriterLock(lock_path)
    if how == "removed":
        os.unlink(lock_path)
    else:
        (tmp_path / "new").touch()
        (tmp_path / "new").rename(lock_path)
    other = files.WriterLock(lock_path)
    for _ in range(2):
        with pytest.raises(LockedError):
            lock.hold()
        other.hold()
    other.release()
    lock.hold()
    assert_locked_by(lock_path, os.getpid())
    lock.release()


def test_a_file_that_loses_its_name_while_it_is_locked_is_not_the_lock(
    lock_path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    really = fcntl.flock
    others: list[files.WriterLock] = []

    def flock(fd: int, how: int) -> None:
        monkeypatch.setattr(fcntl, "flock", really)
        os.rename(lock_path, lock_path + ".former")
        others.append(files.WriterLock(lock_path))
        really(fd, how)

    monkeypatch.setattr(fcntl, "flock", flock)
    with pytest.raises(LockedError):
        files.WriterLock(lock_path)
    others[0].hold()
    others[0].release()


def test_what_cannot_be_made_our_own_is_told_and_nothing_is_left(
    tmp_path: Path, lock_path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "precious").write_bytes(b"precious")
    os.link(tmp_path / "precious", lock_path)
    for owner, name in ((files, "write_at"), (files, "truncate"), (os, "rename")):
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, no_space)
            with pytest.raises(OSError, match="No space left"):
                files.WriterLock(lock_path)
    assert sorted(os.listdir(tmp_path)) == [".writer.lock", "precious"]
    assert (tmp_path / "precious").read_bytes() == b"precious"
    files.WriterLock(lock_path).release()


def take_in_turns(parent: Parent, path: str, count: int) -> int:
    """Take the lock many times; fails where another has it as well. How often it was had."""
    taken = 0
    deadline = time.monotonic() + 60
    while taken < count and time.monotonic() < deadline:
        with suppress(LockedError):
            lock = files.WriterLock(path)
            try:
                for _ in range(3):
                    lock.hold()
                    os.close(os.open(path + ".in", os.O_CREAT | os.O_EXCL))
                    os.unlink(path + ".in")
            finally:
                lock.release()
            taken += 1
    return taken


def test_no_two_have_a_lock_whose_file_gets_other_names_all_the_time(
    lock_path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "_PATIENCE_S", 0.001)
    count = 500
    with (
        Child(take_in_turns, lock_path, count) as one,
        Child(take_in_turns, lock_path, count) as two,
    ):
        links = 0
        while not (one.pipe.poll() and two.pipe.poll()):
            with suppress(FileNotFoundError, FileExistsError):
                os.link(lock_path, f"{lock_path}.{links % 2}")
                links += 1
            with suppress(FileNotFoundError):
                os.unlink(f"{lock_path}.{(links + 1) % 2}")
        assert (one.result(), two.result()) == (count, count)
    assert links > count


# -- looking whether somebody holds a lock ---------------------------------------------------------


def look(parent: Parent, path: str) -> int:
    looks = 0
    while not parent.has_spoken():
        files.is_locked(path)
        looks += 1
    return looks


def test_a_look_at_a_lock_refuses_no_writer(lock_path: str) -> None:
    files.WriterLock(lock_path).release()
    with Child(look, lock_path) as child:
        for _ in range(2000):
            lock = files.WriterLock(lock_path)
            assert files.is_locked(lock_path)
            lock.release()
            assert not files.is_locked(lock_path)
        child.pipe.send("end")
        assert child.result() > 1000


def test_a_look_at_a_lock_takes_no_lock(lock_path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    lock = files.WriterLock(lock_path)
    with monkeypatch.context() as patch:
        patch.setattr(fcntl, "flock", no_space)
        assert files.is_locked(lock_path) is True
    lock.release()
    with monkeypatch.context() as patch:
        patch.setattr(fcntl, "flock", no_space)
        assert files.is_locked(lock_path) is False


def look_once(parent: Parent, path: str) -> bool:
    return files.is_locked(path)


def test_a_lock_is_seen_from_other_processes_and_containers(lock_path: str) -> None:
    script = "import sys; from mmbuf import files; print(files.is_locked(sys.argv[1]))"
    command = [sys.executable, "-c", script, lock_path]
    container = ["unshare", "--pid", "--fork", "--mount-proc"]
    root = str(Path(mmbuf.__file__).parent.parent)

    def told(*before: str) -> str:
        environment = {**os.environ, "PYTHONPATH": root}
        return subprocess.run(
            [*before, *command], env=environment, capture_output=True, text=True, check=True
        ).stdout

    can_contain = not subprocess.run([*container, "true"], capture_output=True).returncode
    lock = files.WriterLock(lock_path)
    assert told() == "True\n"
    if can_contain:
        assert told(*container) == "True\n"
    lock.release()
    assert told() == "False\n"


def test_a_lock_that_a_child_holds_after_its_parent_is_seen(lock_path: str) -> None:
    lock = files.WriterLock(lock_path)
    fd = os.dup(lock._descriptors[0])  # as a child has it that was not forked by Python
    with Child(look_once, lock_path) as child:
        assert child.result() is True
    lock.forget()
    assert files.is_locked(lock_path)
    os.close(fd)
    assert not files.is_locked(lock_path)


def test_a_writer_waits_for_who_locks_the_file_for_a_moment(
    lock_path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    files.WriterLock(lock_path).release()
    fd = os.open(lock_path, os.O_RDONLY)
    fcntl.flock(fd, fcntl.LOCK_SH)
    slept: list[float] = []

    def sleep(sleep_s: float) -> None:
        slept.append(sleep_s)
        if len(slept) == 3:
            os.close(fd)

    monkeypatch.setattr(time, "sleep", sleep)
    files.WriterLock(lock_path).release()
    assert slept == [0.001, 0.002, 0.004]


def test_a_writer_does_not_wait_for_another_writer(
    lock_path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    lock = files.WriterLock(lock_path)
    monkeypatch.setattr(time, "sleep", no_space)
    assert_locked_by(lock_path, os.getpid())
    lock.release()


def test_a_file_that_others_lock_for_long_is_locked(
    lock_path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    Path(lock_path).touch()
    fd = os.open(lock_path, os.O_RDONLY)
    fcntl.flock(fd, fcntl.LOCK_EX)
    monkeypatch.setattr(files, "_PATIENCE_S", 0)
    with pytest.raises(LockedError, match="a process that has not yet said its name"):
        files.WriterLock(lock_path)
    os.close(fd)


def test_a_lock_is_seen_where_the_system_has_no_marks(
    lock_path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("F_OFD_SETLK", "F_OFD_GETLK"):
        monkeypatch.delattr(fcntl, name)
    monkeypatch.setattr(files, "_PATIENCE_S", 0)
    lock = files.WriterLock(lock_path)
    assert files.is_locked(lock_path)
    assert_locked_by(lock_path, os.getpid())
    lock.release()
    assert not files.is_locked(lock_path)
    files.WriterLock(lock_path).release()


def test_a_lock_is_seen_where_the_kernel_knows_no_marks(
    lock_path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any) -> bytes:
        raise OSError(errno.EINVAL, "Invalid argument")

    monkeypatch.setattr(fcntl, "fcntl", refuse)
    lock = files.WriterLock(lock_path)
    assert files.is_locked(lock_path)
    lock.release()
    assert not files.is_locked(lock_path)


# What the system answers where files cannot be locked; 524 has no name outside of the kernel.
NO_FLOCK = [errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP, 524]


def refusing_flock(number: int) -> Callable[..., None]:
    def flock(*_: Any) -> None:
        raise OSError(number, os.strerror(number))

    return flock


@pytest.mark.parametrize("number", NO_FLOCK, ids=map(str, NO_FLOCK))
def test_where_no_file_can_be_locked_one_error_names_the_directory_and_the_remedy(
    tmp_path: Path, lock_path: str, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    kind = files.file_system_of(str(tmp_path))
    monkeypatch.setattr(fcntl, "flock", refusing_flock(number))
    for _ in range(2):
        with pytest.raises(NoLocksError) as error:
            files.WriterLock(lock_path)
    assert str(error.value) == (
        f"{tmp_path}: expected a file system that locks files, got {kind} that does not "
        f"({os.strerror(number)}). Keep it on a local disk, or have it mounted with locks "
        f"(Lustre: -o flock; NFS: version 4, or its lock daemon). Without them it can be read, by "
        f"ReplayReader or load_checkpoint, and a checkpoint can be saved to a new path."
    )
    monkeypatch.undo()
    files.WriterLock(lock_path).release()


def test_a_writer_that_was_killed_where_no_file_can_be_locked_leaves_no_lock(
    lock_path: str,
) -> None:
    """Of the package that took them before: its file stayed, and was the lock."""
    script = (
        "import errno, fcntl, os, signal, sys\n"
        "from mmbuf import NoLocksError, files\n"
        "really = fcntl.flock\n"
        "def flock(*_):\n"
        "    raise OSError(errno.ENOSYS, 'Function not implemented')\n"
        "fcntl.flock = flock\n"
        "try:\n"
        "    files.WriterLock(sys.argv[1])\n"
        "except NoLocksError:\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    root = str(Path(mmbuf.__file__).parent.parent)
    command = [sys.executable, "-c", script, lock_path]
    ran = subprocess.run(command, env={**os.environ, "PYTHONPATH": root})
    assert ran.returncode == -signal.SIGKILL
    files.WriterLock(lock_path).release()


def test_a_lock_that_cannot_be_taken_anew_is_lost(
    lock_path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    lock = files.WriterLock(lock_path)
    os.unlink(lock_path)
    with monkeypatch.context() as patch:
        patch.setattr(fcntl, "flock", refusing_flock(errno.ENOLCK))
        with pytest.raises(NoLocksError):
            lock.hold()
    lock.hold()
    assert_locked_by(lock_path, os.getpid())
    lock.release()


def test_a_lock_that_is_dropped_is_free(lock_path: str) -> None:
    files.WriterLock(lock_path)
    gc.collect()
    files.WriterLock(lock_path).release()


def test_the_temporary_of_a_neighbour_stays(tmp_path: Path) -> None:
    mine, neighbours = files.temporary(str(tmp_path / "a")), files.temporary(str(tmp_path / "a.b"))
    for path in (mine, neighbours):
        Path(path).mkdir()
    files.remove_temporaries_of(str(tmp_path / "a"))
    assert (Path(mine).exists(), Path(neighbours).exists()) == (False, True)
    Path(neighbours).rmdir()


def test_two_empty_directories_are_not_the_same(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    assert not files.is_same(str(tmp_path / "a"), str(tmp_path / "b"))
    assert files.is_same(str(tmp_path / "a"), str(tmp_path / "a"))
