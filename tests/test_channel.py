"""Channel: between threads and between processes, closed, killed, full and empty."""

from __future__ import annotations

import gc
import itertools
import multiprocessing
import os
import pickle
import queue
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import data
import numpy as np
import pytest
import torch
from interrupts import every_call, every_line, storm

from mmbuf.channel import MAX_ITEMS_BETWEEN_PROCESSES, Channel
from mmbuf.errors import ClosedError
from mmbuf.trajectory import Trajectory

# Far more than anything here takes; only a failure lasts so long.
LONG_S = 30.0


# ---------------------------------------------------------------- Channel, both kinds


@pytest.fixture(params=[None, "spawn"], ids=["threads", "processes"])
def make(request: pytest.FixtureRequest) -> Iterator[Callable[[int], Channel]]:
    """Makes channels of both kinds; what a channel promises holds for threads in either."""
    channels: list[Channel] = []

    def make_one(maxsize: int) -> Channel:
        channels.append(Channel(maxsize, request.param))
        return channels[-1]

    yield make_one
    for channel in channels:
        channel.close()


def test_items_come_out_in_order(make: Callable[[int], Channel]) -> None:
    channel = make(3)
    for item in ("a", {"b": [1, None]}, 3.5):
        channel.put(item)
    assert len(channel) == 3
    assert [channel.get() for _ in range(3)] == ["a", {"b": [1, None]}, 3.5]
    assert len(channel) == 0


def test_a_full_channel_refuses_after_the_timeout(make: Callable[[int], Channel]) -> None:
    channel = make(2)
    channel.put(1)
    channel.put(2)
    with pytest.raises(queue.Full):
        channel.put(3, timeout_s=0.05)
    assert [channel.get(), channel.get()] == [1, 2]
    assert len(channel) == 0


def test_an_empty_channel_refuses_after_the_timeout(make: Callable[[int], Channel]) -> None:
    channel = make(1)
    with pytest.raises(queue.Empty):
        channel.get(timeout_s=0.05)


def test_a_timeout_of_zero_takes_what_is_there(make: Callable[[int], Channel]) -> None:
    channel = make(1)
    channel.put(7, timeout_s=0)
    assert channel.get(timeout_s=0) == 7


def test_a_closed_channel_takes_nothing(make: Callable[[int], Channel]) -> None:
    channel = make(2)
    channel.close()
    with pytest.raises(ClosedError, match="the channel is closed"):
        channel.put(1)
    assert len(channel) == 0


def test_a_closed_full_channel_says_that_it_is_closed(make: Callable[[int], Channel]) -> None:
    channel = make(1)
    channel.put(1)
    channel.close()
    with pytest.raises(ClosedError):
        channel.put(2)


def test_what_was_put_before_close_still_comes_out(make: Callable[[int], Channel]) -> None:
    channel = make(2)
    channel.put(1)
    channel.put(2)
    channel.close()
    channel.close()
    assert list(channel) == [1, 2]
    with pytest.raises(ClosedError, match="closed and empty"):
        channel.get(timeout_s=LONG_S)


def test_leaving_the_with_block_closes(make: Callable[[int], Channel]) -> None:
    with make(1) as channel:
        channel.put(1)
    assert list(channel) == [1]


def blocked(call: Callable[[], Any], pool: ThreadPoolExecutor) -> Any:
    """``call`` as a future, after it has had the time to block."""
    future = pool.submit(call)
    time.sleep(0.1)
    assert not future.done()
    return future


def test_close_wakes_a_blocked_get(make: Callable[[int], Channel]) -> None:
    channel = make(1)
    with ThreadPoolExecutor() as pool:
        waiting = [blocked(channel.get, pool) for _ in range(2)]
        channel.close()
        assert [type(w.exception(timeout=2.0)) for w in waiting] == [ClosedError] * 2


def test_close_wakes_a_blocked_put_and_leaves_its_item_out(make: Callable[[int], Channel]) -> None:
    channel = make(1)
    channel.put("in")
    with ThreadPoolExecutor() as pool:
        waiting = [blocked(lambda: channel.put("out"), pool) for _ in range(2)]
        channel.close()
        assert [type(w.exception(timeout=2.0)) for w in waiting] == [ClosedError] * 2
    assert list(channel) == ["in"]


def test_a_get_wakes_a_blocked_put(make: Callable[[int], Channel]) -> None:
    channel = make(1)
    channel.put(1)
    with ThreadPoolExecutor() as pool:
        waiting = blocked(lambda: channel.put(2), pool)
        assert channel.get() == 1
        waiting.result(timeout=2.0)
    assert channel.get() == 2


def test_waiting_costs_no_time_of_the_processor(make: Callable[[int], Channel]) -> None:
    empty, full = make(1), make(1)
    full.put(0)
    with ThreadPoolExecutor() as pool:
        waiting = [blocked(empty.get, pool), blocked(lambda: full.put(1), pool)]
        before = time.process_time()
        time.sleep(0.5)
        spent_s = time.process_time() - before
        empty.close()
        full.close()
        assert all(isinstance(w.exception(timeout=2.0), ClosedError) for w in waiting)
    assert spent_s < 0.1


def test_each_item_of_many_threads_is_got_once(make: Callable[[int], Channel]) -> None:
    channel = make(3)
    most = 0

    def produce(first: int) -> None:
        for item in range(first, first + 100):
            channel.put(item)

    def consume() -> list[int]:
        nonlocal most
        got = []
        for item in channel:
            got.append(item)
            most = max(most, len(channel))
        return got

    with ThreadPoolExecutor(8) as pool:
        consumers = [pool.submit(consume) for _ in range(4)]
        producers = [pool.submit(produce, 100 * i) for i in range(4)]
        for producer in producers:
            producer.result(timeout=LONG_S)
        channel.close()
        got = [item for consumer in consumers for item in consumer.result(timeout=LONG_S)]
    assert sorted(got) == list(range(400))
    assert most <= 3


def test_puts_that_race_with_close_are_either_in_or_refused(
    make: Callable[[int], Channel],
) -> None:
    for _ in range(20):
        channel = make(64)
        start = threading.Barrier(4)

        def produce(first: int, channel: Channel = channel, start: Any = start) -> list[int]:
            accepted = []
            start.wait()
            for item in range(first, first + 10):
                try:
                    channel.put(item)
                except ClosedError:
                    break
                accepted.append(item)
            return accepted

        with ThreadPoolExecutor(3) as pool:
            producers = [pool.submit(produce, 10 * i) for i in range(3)]
            start.wait()
            channel.close()
            accepted = [item for p in producers for item in p.result(timeout=LONG_S)]
        assert sorted(channel) == sorted(accepted)


@pytest.mark.parametrize("maxsize", [0, -1])
@pytest.mark.parametrize("context", [None, "spawn"])
def test_a_channel_without_room_is_refused(maxsize: int, context: str | None) -> None:
    with pytest.raises(ValueError, match=f"maxsize: expected at least 1, got {maxsize}"):
        Channel(maxsize, context)


# ---------------------------------------------------------------- Channel between threads


def test_threads_hand_over_the_item_itself() -> None:
    channel = Channel(1)
    item = object()
    channel.put(item)
    assert channel.get() is item


def test_a_channel_between_threads_does_not_pickle() -> None:
    with pytest.raises(TypeError, match="between processes to be sent to a process"):
        pickle.dumps(Channel(1))


# ---------------------------------------------------------------- Channel between processes


def test_the_largest_channel_between_processes_can_be_filled() -> None:
    channel = Channel(MAX_ITEMS_BETWEEN_PROCESSES, "spawn")
    for item in range(MAX_ITEMS_BETWEEN_PROCESSES):
        channel.put(item, timeout_s=1.0)
    channel.close()
    assert list(channel) == list(range(MAX_ITEMS_BETWEEN_PROCESSES))


def test_a_larger_channel_between_processes_is_refused() -> None:
    with pytest.raises(ValueError, match="at most 256 between processes, got 257"):
        Channel(MAX_ITEMS_BETWEEN_PROCESSES + 1, "spawn")


@pytest.mark.parametrize(
    "sent",
    [
        torch.arange(6).reshape(2, 3),
        torch.arange(6).reshape(2, 3).t(),
        torch.tensor(1.5),
        torch.zeros(2, 0, 3),
        torch.tensor([1.5, -2.0], dtype=torch.bfloat16),
        torch.tensor([True, False]),
        torch.tensor([1 + 2j]).conj(),
        torch.ones(1).expand(3),
        torch.ones(2, requires_grad=True) * 2,
    ],
    ids=lambda sent: f"{sent.dtype}{list(sent.shape)}",
)
def test_tensors_of_every_kind_arrive_equal(sent: torch.Tensor) -> None:
    channel = Channel(1, "spawn")
    channel.put(sent)
    got = channel.get()
    assert (got.dtype, got.shape, got.requires_grad) == (sent.dtype, sent.shape, False)
    assert torch.equal(got, sent)


@pytest.mark.parametrize(
    "sent",
    [
        np.arange(6.0).reshape(2, 3),
        np.arange(6.0).reshape(2, 3)[:, ::-1],
        np.asfortranarray(np.arange(6.0).reshape(2, 3)),
        np.zeros((0, 3)),
        np.array(["a", "bc"]),
        np.array([None, "x"], object),
        np.float32(2.5),
    ],
    ids=lambda sent: f"{sent.dtype}{list(sent.shape)}",
)
def test_arrays_of_every_kind_arrive_equal(sent: Any) -> None:
    channel = Channel(1, "spawn")
    channel.put(sent)
    got = channel.get()
    assert (got.dtype, got.shape) == (sent.dtype, sent.shape)
    assert np.array_equal(got, sent)


def test_the_sender_may_change_what_it_has_put() -> None:
    channel = Channel(1, "spawn")
    given, array = torch.zeros(1000), np.zeros(1000)
    channel.put({"tensor": given, "array": array})
    given.fill_(9)
    array.fill(9)
    got = channel.get()
    assert got["tensor"].count_nonzero() == 0
    assert np.count_nonzero(got["array"]) == 0


def test_the_receiver_may_change_what_it_has_got() -> None:
    channel = Channel(1, "spawn")
    channel.put(torch.zeros(3))
    assert (channel.get() + 1).tolist() == [1.0, 1.0, 1.0]


def test_a_tensor_that_was_got_saves_only_its_own_bytes() -> None:
    channel = Channel(1, "spawn")
    channel.put([torch.zeros(1000), torch.zeros(2)])
    assert channel.get()[1].untyped_storage().nbytes() == 8


def test_an_item_that_does_not_pickle_is_not_put() -> None:
    channel = Channel(1, "spawn")
    with pytest.raises((AttributeError, pickle.PicklingError)):
        channel.put(lambda: None)
    assert len(channel) == 0


@pytest.mark.skipif(sys.platform != "linux", reason="counts descriptors in /proc")
def test_a_module_that_is_just_imported_can_get_an_item_of_its_own(tmp_path: Path) -> None:
    (tmp_path / "importing.py").write_text("""
from mmbuf import Channel
class Item:
    pass
channel = Channel(2, context="spawn")
channel.put(Item())
found = channel.get(timeout_s=10)
""")
    program = "import importing; print(type(importing.found).__name__)"
    done = data.run_python(program, cwd=tmp_path)
    assert (done.returncode, done.stdout) == (0, "Item\n"), done.stderr


def test_channels_and_their_items_leave_no_descriptor_open() -> None:
    def use() -> None:
        channel = Channel(4, "spawn")
        channel.put(torch.zeros(4))
        channel.put("left inside")
        channel.get()
        channel.close()

    assert_leaves_no_descriptor(use)


def assert_leaves_no_descriptor(use: Callable[[], None]) -> None:
    """Used for the second time: the first may open what stays for the process."""
    use()
    gc.collect()
    before = len(os.listdir("/proc/self/fd"))
    use()
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) == before


def send_collected(channel: Channel) -> None:
    for steps in (1, 2, 3):
        channel.put(data.collected(steps).to_trajectory(model_weights_id=str(steps)))
    channel.close()


def echo(requests: Channel, answers: Channel) -> None:
    with answers:
        for item in requests:
            answers.put(item)


def test_trajectories_outlive_the_process_that_put_them() -> None:
    channel = Channel(4, "spawn")
    process = multiprocessing.get_context("spawn").Process(target=send_collected, args=(channel,))
    process.start()
    process.join(LONG_S)
    assert process.exitcode == 0
    got: list[Trajectory] = list(channel)
    assert [(item.num_steps, item.model_weights_id) for item in got] == [
        (1, "1"),
        (2, "2"),
        (3, "3"),
    ]
    expected = data.collected(3).to_trajectory()
    assert data.bits(got[2].actions) == data.bits(expected.actions)
    assert got[2].curr_obs["text"] == expected.curr_obs["text"]


# Forked children below touch no more torch than a channel does: they start in milliseconds.
FORK = multiprocessing.get_context("fork")


def forked(target: Callable[..., None], *args: Any) -> Any:
    process = FORK.Process(target=target, args=args, daemon=True)
    process.start()
    return process


def test_two_processes_talk_both_ways() -> None:
    requests, answers = Channel(2, FORK), Channel(2, FORK)
    process = forked(echo, requests, answers)
    for item in range(3):
        requests.put(item, timeout_s=LONG_S)
        assert answers.get(timeout_s=LONG_S) == item
    requests.close()
    process.join(LONG_S)
    assert list(answers) == []
    assert process.exitcode == 0


def put_range(channel: Channel, first: int) -> None:
    for item in range(first, first + 50):
        channel.put((item, np.full(1000, item)))


def forward(channel: Channel, results: Channel) -> None:
    for item, array in channel:
        assert (array == item).all()
        results.put(item)


def test_each_item_of_many_processes_is_got_once() -> None:
    channel, results = Channel(2, FORK), Channel(200, FORK)
    producers = [forked(put_range, channel, 50 * i) for i in range(3)]
    consumers = [forked(forward, channel, results) for _ in range(2)]
    for producer in producers:
        producer.join(LONG_S)
    channel.close()
    for consumer in consumers:
        consumer.join(LONG_S)
    results.close()
    assert [p.exitcode for p in producers + consumers] == [0] * 5
    assert sorted(results) == list(range(150))


class KillsItsProcess:
    """Dies while it is pickled: in the middle of a put."""

    def __reduce__(self) -> Any:
        os.kill(os.getpid(), signal.SIGKILL)
        raise AssertionError


def put_and_die(channel: Channel) -> None:
    channel.put("whole")
    channel.put(KillsItsProcess())


def die_in_turn(channel: Channel) -> None:
    channel._items._turn.acquire()  # type: ignore[union-attr]
    os.kill(os.getpid(), signal.SIGKILL)


def put_two(channel: Channel) -> None:
    channel.put(1)
    channel.put(2)


def test_a_producer_killed_in_a_put_has_put_nothing() -> None:
    channel = Channel(2, FORK)
    process = forked(put_and_die, channel)
    process.join(LONG_S)
    assert process.exitcode == -signal.SIGKILL
    channel.close()
    assert channel.get(timeout_s=LONG_S) == "whole"
    with pytest.raises(ClosedError):
        channel.get(timeout_s=LONG_S)


def test_a_producer_killed_in_its_turn_stops_nobody() -> None:
    channel = Channel(2, FORK)
    forked(die_in_turn, channel).join(LONG_S)
    channel.put(1, timeout_s=LONG_S)
    before = time.monotonic()
    channel.put(2, timeout_s=LONG_S)
    assert time.monotonic() - before < 0.5
    channel.close()
    assert list(channel) == [1, 2]


def test_a_producer_killed_while_it_waits_takes_no_room() -> None:
    channel = Channel(1, FORK)
    process = forked(put_two, channel)
    assert not process.join(0.5)
    process.kill()
    process.join(LONG_S)
    assert channel.get(timeout_s=LONG_S) == 1
    channel.put(3, timeout_s=LONG_S)
    assert channel.get(timeout_s=LONG_S) == 3


def test_close_wakes_a_get_in_another_process() -> None:
    requests, answers = Channel(1, FORK), Channel(1, FORK)
    process = forked(echo, requests, answers)
    time.sleep(0.2)
    requests.close()
    process.join(5.0)
    assert process.exitcode == 0


# ---------------------------------------------------------------- interrupted by signal handlers


def in_thread(call: Callable[[], Any]) -> Any:
    """What ``call`` gives in another thread, that would wait for ever for a lock left held."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(call).result(timeout=LONG_S)


def test_what_an_interrupted_put_did_not_return_from_is_not_in(
    make: Callable[[int], Channel],
) -> None:
    channel, returned = make(2), []
    for interrupt in every_call():
        interrupt(lambda: returned.append(channel.put("item")))
        assert len(channel) == len(returned), interrupt.place
        in_thread(lambda: channel.put("other", timeout_s=LONG_S))
        assert [channel.get() for _ in range(len(channel))] == ["item"] * len(returned) + ["other"]
        returned.clear()


def test_what_an_interrupted_get_did_not_return_is_still_there(
    make: Callable[[int], Channel],
) -> None:
    channel = make(3)
    numbers = iter(range(10_000))
    expected: list[int] = []
    for interrupt in every_call():
        while len(channel) < 3:
            expected.append(next(numbers))
            channel.put(expected[-1], timeout_s=LONG_S)
        if not interrupt(lambda: channel.get()) or interrupt.result is not None:
            assert interrupt.result == expected.pop(0), interrupt.place
        assert len(channel) == len(expected), interrupt.place
        assert in_thread(lambda: channel.get(timeout_s=LONG_S)) == expected.pop(0), interrupt.place


@pytest.mark.parametrize("every", [every_line, every_call])
def test_an_interrupted_wait_keeps_nobody_waiting(
    make: Callable[[int], Channel], every: Any
) -> None:
    for interrupt in every():
        channel = make(1)
        with suppress(queue.Empty):
            interrupt(lambda: channel.get(timeout_s=0.001))  # noqa: B023
        channel.put(1)
        with suppress(queue.Full):
            interrupt(lambda: channel.put(2, timeout_s=0.001))  # noqa: B023
        assert in_thread(lambda: channel.get(timeout_s=LONG_S)) == 1  # noqa: B023
        in_thread(lambda: channel.put(3, timeout_s=LONG_S))  # noqa: B023
        assert channel.get(timeout_s=LONG_S) == 3, interrupt.place
        channel.close()


def test_an_interrupted_close_closed_or_not_and_can_be_called_again(
    make: Callable[[int], Channel],
) -> None:
    for interrupt in every_line():
        channel = make(1)
        with ThreadPoolExecutor(1) as pool:
            waiting = pool.submit(channel.get)
            interrupt(channel.close)
            channel.close()
            assert isinstance(waiting.exception(timeout=LONG_S), ClosedError), interrupt.place


def test_a_handler_may_use_the_channel_within_any_call_of_it(
    make: Callable[[int], Channel],
) -> None:
    """No item is lost or doubled, and nobody waits for who is below him."""
    for call in ("put", "get"):
        channel, given, got = make(8), [0], []
        channel.put(0)

        def handle() -> None:
            given.append(len(given))  # noqa: B023
            channel.put(given[-1], timeout_s=LONG_S)  # noqa: B023
            got.append(channel.get(timeout_s=LONG_S))  # noqa: B023

        for interrupt in every_call():
            if call == "put":
                given.append(len(given))
                interrupt(lambda: channel.put(given[-1]), handle)  # noqa: B023
                got.append(channel.get(timeout_s=LONG_S))
            else:
                interrupt(channel.get, handle)
                got.append(interrupt.result)
                given.append(len(given))
                channel.put(given[-1])
        got.append(channel.get(timeout_s=LONG_S))
        assert sorted(got) == given
        assert len(channel) == 0


def test_a_handler_that_closes_within_a_put_or_a_get_leaves_no_item_inside(
    make: Callable[[int], Channel],
) -> None:
    for interrupt in every_call():
        channel, put, got = make(2), [], []

        def run() -> None:
            channel.put("item")  # noqa: B023
            put.append("item")  # noqa: B023
            got.append(channel.get())  # noqa: B023

        with suppress(ClosedError):
            interrupt(run, channel.close)
        got += [] if not interrupt.was_met else channel
        assert got == put, interrupt.place


def test_an_interrupt_ends_a_get_and_a_put_that_wait(make: Callable[[int], Channel]) -> None:
    channel = make(1)

    def raise_it(*_: object) -> None:
        raise TimeoutError("by the handler")

    before = signal.signal(signal.SIGALRM, raise_it)
    try:
        for call in (channel.get, lambda: channel.put(2)):
            signal.setitimer(signal.ITIMER_REAL, 0.1)
            began_s = time.monotonic()
            with pytest.raises(TimeoutError, match="by the handler"):
                call()
            assert time.monotonic() - began_s < 5.0
            if not len(channel):
                channel.put(1)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert channel.get() == 1


@pytest.mark.parametrize("of_main", ["get", "put"])
def test_random_interrupts_neither_lose_nor_double_an_item(
    make: Callable[[int], Channel], of_main: str
) -> None:
    """Real signals, in the main thread; the other end is another thread."""
    channel, got, num_interrupted = make(2), [], 0
    deadline = time.monotonic() + 1.5
    last = None

    def produce() -> None:
        with channel:
            for number in itertools.count():
                if time.monotonic() > deadline:
                    return
                channel.put(number)

    def consume() -> None:
        got.extend(channel)

    other = threading.Thread(target=produce if of_main == "get" else consume)
    with storm(3, 0.003) as is_open:
        other.start()
        number, is_closed = 0, False
        while not is_closed and (of_main == "get" or time.monotonic() < deadline):
            has_got = False
            try:
                is_open[0] = True
                if of_main == "get":
                    last = channel.get()
                    has_got = True
                else:
                    channel.put(number)
                    number += 1
                is_open[0] = False
            except KeyboardInterrupt:
                is_open[0] = False
                num_interrupted += 1
            except ClosedError:
                is_open[0] = False
                is_closed = True
            if has_got:
                got.append(last)
    channel.close()
    other.join(LONG_S)
    assert not other.is_alive()
    assert num_interrupted > 20
    assert got == list(range(len(got)))
    assert of_main == "get" or len(got) == number


@pytest.mark.skipif(sys.platform != "linux", reason="counts descriptors in /proc")
def test_interrupted_puts_and_gets_leave_no_descriptor_open() -> None:
    def use() -> None:
        channel = Channel(2, "spawn")
        for interrupt in every_call():
            if not len(channel):
                channel.put(torch.zeros(4))
            interrupt(lambda: channel.get())
        for interrupt in every_call():
            interrupt(lambda: channel.put(torch.zeros(4)))
            if len(channel):
                channel.get()
        channel.put(torch.zeros(4))
        channel._items._returned += (received(channel),)  # type: ignore[union-attr]

    assert_leaves_no_descriptor(use)


def received(channel: Channel) -> Any:
    """The message of a get that was interrupted as soon as it had one."""
    for interrupt in every_call():
        interrupt(lambda: channel.get())
        returned = channel._items._returned  # type: ignore[union-attr]
        if returned:
            return returned.popleft()
        if interrupt.result is not None:
            channel.put(interrupt.result)
    raise AssertionError


def get_nothing(channel: Channel) -> None:
    with suppress(queue.Empty):
        channel.get(timeout_s=0)
        os._exit(1)


def test_what_an_interrupted_get_holds_is_not_got_by_a_forked_child_as_well() -> None:
    channel = Channel(2, FORK)
    channel.put("item")
    channel._items._returned += (received(channel),)  # type: ignore[union-attr]
    process = forked(get_nothing, channel)
    process.join(LONG_S)
    assert process.exitcode == 0
    assert channel.get(timeout_s=LONG_S) == "item"


class Spoilt:
    """Cannot be loaded."""

    def __reduce__(self) -> Any:
        return int, ("spoilt",)


def test_an_item_that_cannot_be_loaded_is_told_once() -> None:
    channel = Channel(2, "spawn")
    channel.put(Spoilt())
    channel.put(2)
    with pytest.raises(ValueError, match="spoilt"):
        channel.get()
    assert len(channel) == 1
    assert channel.get() == 2
