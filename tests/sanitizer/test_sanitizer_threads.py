"""``torch.openreg.sanitizer`` and threads: what one has waited for counts for those that it told.

In most of these tests one thread waits for a stream and tells another, which then uses what the
stream wrote. Where nothing tells it, a plain list says when: that is no order.
"""

import asyncio
import colorsys
import ctypes
import functools
import importlib
import importlib.util
import logging
import multiprocessing
import os
import queue
import socket
import subprocess
import sys
import sysconfig
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.pool import ThreadPool

import pytest
import torch
from race_pairs import DEVICE, found, openreg, sanitizer
from torch.multiprocessing.reductions import reduce_tensor

pytestmark = [pytest.mark.usefixtures("watching"), pytest.mark.racy]

OLD_LOCK, OLD_RLOCK = threading.Lock(), threading.RLock()  # of before the sanitizer was on


def poll(flags):
    """Waits, and nobody knows."""
    while not flags:
        time.sleep(0.0005)


def written_aside():
    """A tensor, and the stream that has written it."""
    x, side = torch.ones(100, device=DEVICE), openreg.Stream()
    side.wait_stream(openreg.current_stream())
    with side:
        x.mul_(2)
    return x, side


def started(*functions):
    """Threads of these functions, started in this order; main joins them at the end. What one
    raises is raised."""
    errors = []

    def run(function):
        try:
            function()
        except BaseException as error:
            errors.append(error)

    threads = [
        threading.Thread(target=run, args=(function,), daemon=True) for function in functions
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    if errors:
        raise errors[0]


def hand_over(tell, hear):
    x, side = written_aside()
    flags = []

    def first():
        poll(flags)  # both have been started
        side.synchronize()
        tell()

    def second():
        flags.append(1)
        hear()
        x.add_(1)

    started(first, second)


# ---- What orders ----


def with_lock(make):
    """The first has the lock until it has waited."""

    def way():
        lock, held = make(), []

        def tell():
            with lock:
                held.append(1)
                time.sleep(0.005)

        def hear():
            poll(held)
            with lock:
                pass

        return tell, hear

    return way


def by_release(make):
    """One releases what the other waits to acquire."""

    def way():
        semaphore = make()
        return semaphore.release, semaphore.acquire

    return way


def taken_lock():
    lock = threading.Lock()
    lock.acquire()
    return lock


def by_bound_methods():
    """As threading.Condition keeps those of its lock."""
    lock = taken_lock()
    return lock.release, functools.partial(lock.acquire, True, 60)


def by_asking_a_lock():
    lock = taken_lock()
    return lock.release, lambda: poll_until(lambda: not lock.locked())


def poll_until(condition):
    while not condition():
        time.sleep(0.0005)


def by_event():
    event = threading.Event()
    return event.set, lambda: event.wait(60)


def by_asking_an_event():
    event = threading.Event()
    return event.set, lambda: poll_until(event.is_set)


def by_condition():
    condition, said = threading.Condition(), []

    def tell():
        with condition:
            said.append(1)
            condition.notify_all()

    def hear():
        with condition:
            condition.wait_for(lambda: said, 60)

    return tell, hear


def by_condition_of_nobody():
    """The one that waits wakes by itself, and has the lock again."""
    condition, said = threading.Condition(), []

    def tell():
        with condition:
            said.append(1)

    def hear():
        condition.acquire()
        while not said:
            condition.wait(0.001)
        return condition  # is kept

    return tell, hear


def by_barrier():
    barrier = threading.Barrier(2)
    return barrier.wait, barrier.wait


def by_queue(make):
    def way():
        tasks = make()
        return lambda: tasks.put((1,)), tasks.get

    return way


def by_queue_that_is_asked():
    tasks = queue.Queue()
    return lambda: tasks.put(1), lambda: poll_until(lambda: not tasks.empty())


def by_joining_a_queue():
    tasks = queue.Queue()
    tasks.put(1)
    tasks.get()
    return tasks.task_done, tasks.join


def by_pipe():
    reads, writes = os.pipe()
    return lambda: os.write(writes, b"x"), lambda: os.read(reads, 1)


def by_file_of_a_pipe():
    reads, writes = os.pipe()
    file = os.fdopen(reads)
    return lambda: os.write(writes, b"x\n"), file.readline


def by_socket():
    here, there = socket.socketpair()
    return lambda: here.send(b"x"), lambda: there.recv(1)


def by_connection():
    here, there = multiprocessing.Pipe()
    return lambda: here.send(1), there.recv


def by_ctypes():
    libc, semaphore = ctypes.CDLL(None), ctypes.create_string_buffer(32)
    libc.sem_init(semaphore, 0, 0)
    return lambda: libc.sem_post(semaphore), lambda: libc.sem_wait(semaphore)


def by_future_of_torch():
    future = torch.futures.Future()
    return lambda: future.set_result(1), future.wait


def by_store():
    store = torch.distributed.HashStore()
    return lambda: store.set("done", "1"), lambda: store.get("done")


WAYS = {
    "lock": with_lock(threading.Lock),
    "an old lock": with_lock(lambda: OLD_LOCK),
    "rlock": with_lock(threading.RLock),
    "an old rlock": with_lock(lambda: OLD_RLOCK),
    "a semaphore as a lock": with_lock(threading.Semaphore),
    "a released lock": by_release(taken_lock),
    "semaphore": by_release(lambda: threading.Semaphore(0)),
    "bound methods": by_bound_methods,
    "locked": by_asking_a_lock,
    "event": by_event,
    "is_set": by_asking_an_event,
    "condition": by_condition,
    "condition without notify": by_condition_of_nobody,
    "barrier": by_barrier,
    "queue": by_queue(queue.Queue),
    "priority queue": by_queue(queue.PriorityQueue),
    "simple queue": by_queue(queue.SimpleQueue),
    "empty": by_queue_that_is_asked,
    "task_done": by_joining_a_queue,
    "pipe": by_pipe,
    "file of a pipe": by_file_of_a_pipe,
    "socket": by_socket,
    "connection": by_connection,
    "a lock of processes": by_release(lambda: multiprocessing.Semaphore(0)),
    "ctypes": by_ctypes,
    "torch future": by_future_of_torch,
    "store": by_store,
}


EXTENSION = """
#include <Python.h>
#include <semaphore.h>
static sem_t semaphore;
static PyObject *post(PyObject *m, PyObject *args) { sem_post(&semaphore); Py_RETURN_NONE; }
static PyObject *await(PyObject *m, PyObject *args) {
  Py_BEGIN_ALLOW_THREADS
  sem_wait(&semaphore);
  Py_END_ALLOW_THREADS
  Py_RETURN_NONE;
}
static PyMethodDef methods[] = {{"post", post, METH_VARARGS}, {"wait", await, METH_VARARGS}, {0}};
static PyModuleDef module = {PyModuleDef_HEAD_INIT, "waits_in_c", 0, -1, methods};
PyObject *PyInit_waits_in_c(void) { sem_init(&semaphore, 0, 0); return PyModule_Create(&module); }
"""


def test_lock_of_an_extension_counts_as_order(tmp_path):
    source, library = tmp_path / "waits_in_c.c", tmp_path / "waits_in_c.so"
    source.write_text(EXTENSION)
    include = sysconfig.get_path("include")
    command = [*os.environ.get("CC", "cc").split(), "-shared", "-fPIC", f"-I{include}"]
    subprocess.run([*command, source, "-o", library], check=True)
    spec = importlib.util.spec_from_file_location("waits_in_c", library)
    extension = importlib.util.module_from_spec(spec)
    assert not found(hand_over, extension.post, extension.wait)


def test_torch_future_callback_is_ordered_after_its_registration():
    """The thread that sets the result calls it."""

    def program():
        x, side = written_aside()
        future, flags = torch.futures.Future(), []

        def asks():
            side.synchronize()
            future.then(lambda _: x.add_(1))
            flags.append(1)

        def sets():
            poll(flags)
            future.set_result(1)

        started(asks, sets)

    assert not found(program)


def test_read_of_a_disk_file_orders_nothing():
    """As whoever prints a report does, who so would see no other."""
    flags = []

    def hear():
        poll(flags)
        with open(__file__, "rb", buffering=0) as file:
            file.read(10)

    assert found(hand_over, lambda: flags.append(1), hear)


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
def test_hand_over_between_threads_orders_them(way):
    assert not found(hand_over, *way())


def test_polled_flag_orders_no_threads():
    flags = []
    (report,) = found(hand_over, lambda: flags.append(1), lambda: poll(flags))
    assert report == "aten::add_.Tensor / aten::mul_.Tensor"
    assert "another thread has waited for it" in sanitizer.reports()[0].advice


@pytest.mark.parametrize("wait", ["synchronize", "event", "query", "event query", "device"])
def test_wait_or_query_of_any_kind_counts_for_its_thread(wait):
    """And a query that happened to be true is one."""

    def program(here):
        x, side = written_aside()
        event, flags = side.record_event(), []
        waits = {
            "synchronize": side.synchronize,
            "event": event.synchronize,
            "query": lambda: poll_until(side.query),
            "event query": lambda: poll_until(event.query),
            "device": openreg.synchronize,
        }

        def first():
            waits[wait]()
            if here:
                x.add_(1)
            flags.append(1)

        def second():
            poll(flags)
            if not here:
                x.add_(1)

        started(first, second)

    assert not found(program, True)
    assert found(program, False)


def test_another_lock_orders_no_threads():
    one, other, flags = threading.Lock(), threading.Lock(), []

    def tell():
        with one:
            flags.append(1)

    def hear():
        poll(flags)
        with other:
            pass

    assert found(hand_over, tell, hear)


def test_lock_released_before_the_wait_orders_no_threads():
    lock, flags = threading.Lock(), []
    with lock:
        pass

    def hear():
        poll(flags)
        with lock:
            pass

    assert found(hand_over, lambda: flags.append(1), hear)


@pytest.mark.parametrize("make", [threading.Lock, threading.RLock, queue.SimpleQueue])
def test_lock_at_the_address_of_an_earlier_one_orders_no_threads(make):
    addresses = []

    def tell():
        lock = make()
        (lock.put if make is queue.SimpleQueue else lock.acquire)(1)
        if make is not queue.SimpleQueue:
            lock.release()
        address = id(lock)
        del lock
        addresses.append(address)

    def hear():
        poll(addresses)
        kept = []
        while not kept or id(kept[-1]) != addresses[0]:
            kept.append(make())
            assert len(kept) < 100_000
        (kept[-1].qsize if make is queue.SimpleQueue else kept[-1].acquire)()

    assert found(hand_over, tell, hear)


# ---- Begin and end of threads ----


def test_thread_start_orders_the_started_thread():
    def program(waits):
        x, side = written_aside()
        if waits:
            side.synchronize()
        started(lambda: x.add_(1))

    assert not found(program, True)
    assert found(program, False)


def end_by(hear, uses=lambda use: use()):
    """Main, or whom it starts for it, uses what the thread has waited for."""

    def program():
        x, side = written_aside()
        flags = []

        def wait():
            side.synchronize()
            flags.append(1)

        thread = threading.Thread(target=wait)
        thread.start()
        hear(thread, flags)
        uses(lambda: x.add_(1))
        thread.join()

    return program


ENDS = {
    "join": lambda thread, flags: thread.join(),
    "join again": lambda thread, flags: (thread.join(), thread.join()),
    "is_alive": lambda thread, flags: poll_until(lambda: not thread.is_alive()),
    "enumerate": lambda thread, flags: poll_until(lambda: thread not in threading.enumerate()),
}


@pytest.mark.parametrize("hear", ENDS.values(), ids=ENDS)
def test_thread_end_orders_a_thread_that_asks_for_it(hear):
    assert not found(end_by(hear))


def test_thread_end_orders_no_thread_that_has_not_asked():
    assert found(end_by(lambda thread, flags: poll(flags)))


@pytest.mark.parametrize("ask", [threading.Thread.join, threading.Thread.is_alive])
def test_thread_end_orders_a_second_thread_that_asks(ask):
    def program():
        x, side = written_aside()
        first, joined = threading.Thread(target=side.synchronize), []
        first.start()

        def second():
            poll(joined)
            getattr(first, ask.__name__)()
            x.add_(1)

        started(lambda: joined.append(first.join()), second)

    assert not found(program)


def test_thread_end_does_not_order_the_next_thread():
    def hear(thread, flags):
        poll(flags)
        time.sleep(0.02)  # likely it has ended; it is no order whether or not

    assert found(end_by(hear, uses=started))


class Cached:
    @functools.cached_property
    def value(self):
        return 1


@functools.cache
def _shared():
    return torch.empty(1, device="openreg")


def _share():
    with torch.openreg.Stream():  # whose order the record of the export is in
        reduce_tensor(_shared())


OWN = {
    "threading": lambda: None,
    "logging": lambda: logging.getLogger("openreg.test").error("said"),
    "cached_property": lambda: Cached().value,
    "import": lambda: importlib.reload(colorsys),
    "print": lambda: print("printed", flush=True),
    "tempfile": lambda: tempfile.NamedTemporaryFile().close(),
    "executors": lambda: ThreadPoolExecutor(1).submit(int),
    "sharing": _share,
    "ipc_collect": torch.openreg.ipc_collect,
}


@pytest.mark.parametrize("own", OWN.values(), ids=OWN)
def test_locks_that_python_takes_for_itself_order_nothing(own):
    """The second thread begins when the first one is gone, which it has not asked for."""

    def program():
        x, side = written_aside()
        gone = []

        def wait():
            side.synchronize()
            own()
            gone.append(threading.get_native_id())

        def use():
            own()
            x.add_(1)

        threading.Thread(target=wait).start()
        poll(gone)
        while os.path.exists(f"/proc/self/task/{gone[0]}"):
            time.sleep(0.0005)
        second = threading.Thread(target=use)
        second.start()
        second.join()

    own()  # what is made once is there
    assert found(program)


def test_thread_that_cannot_be_followed_counts_as_ordered():
    """One that ctypes has made is C's, and so are those that run when the sanitizer comes."""
    x, side = written_aside()
    sanitizer.disable()
    begin, over = [], []

    def wait():
        poll(begin)
        side.synchronize()
        over.append(1)

    old = threading.Thread(target=wait)
    old.start()
    sanitizer.enable("warn")
    with side:
        x.mul_(2)
    begin.append(1)
    poll(over)
    started(lambda: x.add_(1))
    old.join()

    with side:
        x.mul_(2)  # reported; this is about the next
    sanitizer.clear()
    over.clear()
    routine = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p)(lambda _: wait())
    thread = ctypes.c_ulong()
    libc = ctypes.CDLL(None)
    assert libc.pthread_create(ctypes.byref(thread), None, routine, None) == 0
    poll(over)
    started(lambda: x.add_(1))
    libc.pthread_join(thread, None)
    assert not sanitizer.reports()


# ---- Pools and loops ----


def test_executor_results_order_the_caller():
    def program(waits):
        """One worker waits and stays there, the other one uses it."""
        x, side = written_aside()
        flags, leave = [], [1] if waits else []

        def wait():
            side.synchronize()
            flags.append(1)
            poll(leave)

        with ThreadPoolExecutor(2) as pool:
            over = pool.submit(wait)
            over.result() if waits else poll(flags)
            pool.submit(x.add_, 1).result()
            leave.append(1)

    assert not found(program, True)
    assert found(program, False)


def test_thread_pool_results_order_the_caller():
    def program(kind):
        x, side = written_aside()
        with ThreadPool(2) as pool:
            getattr(pool, kind)(lambda s: s.synchronize(), [side])
            pool.map(lambda t: t.add_(1), [x])

    assert not found(program, "map")


def test_asyncio_await_orders_the_caller():
    def program(waits):
        async def main():
            x, side = written_aside()
            flags, leave = [], [1] if waits else []

            def wait():
                side.synchronize()
                flags.append(1)
                poll(leave)

            task = asyncio.get_running_loop().run_in_executor(None, wait)
            if waits:
                await task
            else:
                poll(flags)
            x.add_(1)
            leave.append(1)
            await task

        asyncio.run(main())

    assert not found(program, True)
    assert found(program, False)


@pytest.mark.parametrize("wakes", [True, False])
def test_call_soon_threadsafe_orders_its_callback(wakes):
    def program():
        async def main():
            x, side = written_aside()
            loop, told = asyncio.get_running_loop(), asyncio.Event()
            if not wakes:  # a loop that is awake may come to the call before it hears of it
                loop._write_to_self = lambda: None

            def wait():
                side.synchronize()
                loop.call_soon_threadsafe(told.set)

            thread = threading.Thread(target=wait)
            thread.start()
            while not wakes and not told.is_set():
                await asyncio.sleep(0)
            await told.wait()
            x.add_(1)
            thread.join()

        asyncio.run(main())

    assert not found(program)


# ---- Autograd ----


class Doubled(torch.autograd.Function):
    """Its backward reads what it was given, and takes a lock as hooks do."""

    lock = threading.Lock()

    @staticmethod
    def forward(ctx, x, aside):
        ctx.aside = aside
        return x * 2

    @staticmethod
    def backward(ctx, grad):
        with Doubled.lock:
            pass
        return grad * ctx.aside, None


def backward_after(waits):
    """In a thread of autograd, what a thread knows who called backward()."""
    aside, side = written_aside()
    x = torch.ones(100, device=DEVICE, requires_grad=True)
    loss = Doubled.apply(x, aside).sum()
    flags = []

    def other():
        side.synchronize()
        flags.append(1)

    def trains():
        poll(flags)
        if waits:
            side.synchronize()
        loss.backward()

    started(other, trains)


def test_backward_is_ordered_after_its_caller():
    assert not found(backward_after, True)
    (report,) = found(backward_after, False)
    assert report == "aten::mul.Tensor / aten::mul_.Tensor"


def test_backward_waits_order_its_caller():
    def program(hook):
        x, side = written_aside()
        y = torch.ones(100, device=DEVICE, requires_grad=True)
        y.register_hook(lambda grad: side.synchronize() if hook else None)

        def trains():
            (y * 2).sum().backward()
            x.add_(1)

        flags = []
        started(lambda: poll(flags), lambda: (trains(), flags.append(1)))

    assert not found(program, True)
    assert found(program, False)


class Scales(torch.nn.Module):
    def __init__(self, aside):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(100, device=DEVICE))
        self.aside = aside

    def forward(self):
        return Doubled.apply(self.weight, self.aside).sum()


def test_ddp_reducer_is_ordered_after_its_caller(tmp_path):
    def program(waits):
        aside, side = written_aside()
        model = torch.nn.parallel.DistributedDataParallel(Scales(aside))
        loss, flags = model(), []

        def other():
            side.synchronize()
            flags.append(1)

        def trains():
            poll(flags)
            if waits:
                side.synchronize()
            loss.backward()
            model.module.weight.grad.add_(1)

        started(other, trains)

    store = torch.distributed.FileStore(str(tmp_path / "store"), 1)
    torch.distributed.init_process_group(store=store, rank=0, world_size=1)
    try:
        assert not found(program, True)
        (report,) = found(program, False)
        assert report == "aten::mul.Tensor / aten::mul_.Tensor"
    finally:
        torch.distributed.destroy_process_group()


# ---- On and off ----


def test_thread_functions_are_restored_when_it_is_off():
    patched = (threading.Thread.join, threading.Event.is_set, threading._start_new_thread)
    sanitizer.disable()
    try:
        now = (threading.Thread.join, threading.Event.is_set, threading._start_new_thread)
        assert all(a is not b for a, b in zip(patched, now, strict=True))
        assert now[0].__module__ == "threading" and not hasattr(now[0], "__wrapped__")
        assert now[2].__class__.__name__ == "builtin_function_or_method"
    finally:
        sanitizer.enable("warn")


def test_thread_functions_that_others_wrapped_stay():
    join, calls = threading.Thread.join, []

    def counted(self, timeout=None):
        calls.append(self)
        return join(self, timeout)

    threading.Thread.join = counted
    sanitizer.disable()
    try:
        started(lambda: None)
        assert len(calls) == 1
    finally:
        threading.Thread.join = join.__wrapped__
        sanitizer.enable("warn")


def test_sanitizer_may_be_switched_while_threads_are_in_locks():
    lock, tasks, done = threading.Lock(), queue.SimpleQueue(), []
    lock.acquire()

    def takes():
        with lock:
            done.append(tasks.get())

    threads = [threading.Thread(target=takes) for _ in range(4)]
    for i, thread in enumerate(threads):
        thread.start()
        (sanitizer.disable, lambda: sanitizer.enable("warn"))[i % 2]()
    lock.release()
    for i in range(4):
        (sanitizer.disable, lambda: sanitizer.enable("warn"))[i % 2]()
        tasks.put(i)
    for thread in threads:
        thread.join(60)
    assert sorted(done) == list(range(4))


def test_sanitizer_may_be_switched_by_threads_at_once():
    before = sys.getswitchinterval()

    def switch():
        for _ in range(200):
            sanitizer.enable()
            sanitizer.disable()

    sys.setswitchinterval(1e-6)
    try:
        started(*[switch] * 4)
        assert threading.active_count() and ctypes.CDLL(None).abs(-3) == 3
        sanitizer.disable()
        assert type(threading._start_new_thread).__name__ == "builtin_function_or_method"
    finally:
        sys.setswitchinterval(before)
        sanitizer.enable("warn")


def test_ctypes_calls_work_while_the_sanitizer_is_off():
    with_it = ctypes.CDLL(None)
    sanitizer.disable()
    try:
        for library in (with_it, ctypes.CDLL(None)):
            assert library.abs(-3) == 3
            with pytest.raises(ctypes.ArgumentError):
                library.abs(object())
    finally:
        sanitizer.enable("warn")
    assert with_it.abs(-3) == 3
