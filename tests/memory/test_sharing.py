"""Tensors and events of several processes: what PyTorch's test_multiprocessing.py asks of CUDA, and
what is left when one of them is killed."""

import contextlib
import gc
import os
import pickle
import re
import signal
import threading
import time
from functools import partial
from multiprocessing import resource_tracker
from multiprocessing.reduction import ForkingPickler
from random import Random

import pytest
import torch
import torch.multiprocessing as mp
from torch.multiprocessing import reductions

from torch_openreg import _C, _transit

DEVICE = "openreg:1"
TIMEOUT = 120
# The errors that a receiver may get when its sender is killed.
KILLED = "help: the sender must live|ended before its work was done|that sent it on has ended"
pytestmark = pytest.mark.simulated_device("it shares memory between processes")


@pytest.fixture(scope="module")
def context():
    context = mp.get_context("forkserver")
    context.set_forkserver_preload(["torch", __name__])
    return context


def stats(collect=True):
    gc.collect()
    if collect:
        torch.openreg.ipc_collect()
    return _C._ipc_stats()


def until(condition, *, seconds=30):
    end = time.monotonic() + seconds
    while not condition() and time.monotonic() < end:
        time.sleep(0.01)
    assert condition()


class Partner:
    """A process that runs `body(self's ends, *args)`, with a queue each way."""

    def __init__(self, context, body, *args):
        self.to, self.back = context.SimpleQueue(), context.SimpleQueue()
        self.process = context.Process(target=_run, args=(body, self.to, self.back, args))
        self.process.start()

    def __enter__(self):
        return self

    def __exit__(self, *exc_info):
        if exc_info[0] is not None:
            self.process.kill()
        else:
            self.to.put(None)
        self.process.join(TIMEOUT)
        assert exc_info[0] is not None or self.process.exitcode == 0

    def ask(self, value):
        self.to.put(value)
        answer = self.back.get()
        if isinstance(answer, Exception):
            raise answer
        return answer

    def kill(self):
        os.kill(self.process.pid, signal.SIGKILL)
        self.process.join(TIMEOUT)


def _run(body, requests, answers, args):
    body(requests, answers, *args)


def answer(requests, answers):
    """Runs each function that it gets, with what it keeps, and sends the result."""
    kept = {}
    while (request := requests.get()) is not None:
        function, *args = request
        try:
            answers.put(function(kept, *args))
        except Exception as error:
            answers.put(error)
        del request, args


def double(kept, tensor):
    with torch.no_grad():
        tensor.mul_(2)
    return tensor.cpu().tolist()


def keep(kept, value):
    kept[len(kept)] = value


def lookup(kept, name):
    return float(kept[name])


def drop(kept):
    kept.clear()
    gc.collect()


def describe(kept, value):
    return (type(value), value.requires_grad, value.dtype, value.stride(), value.tolist())


def test_queue_shares_memory_with_a_process(context):
    with Partner(context, answer) as partner:
        base = torch.arange(12.0, device=DEVICE)
        for view in (base, base[3:7], base.view(3, 4).t(), base[::2]):
            before = view.cpu()
            assert partner.ask((double, view)) == (before * 2).tolist()
            assert torch.equal(view.cpu(), before * 2)
        parameter = torch.nn.Parameter(torch.ones(3, device=DEVICE))
        kind, requires_grad, *_, values = partner.ask((describe, parameter))
        assert (kind, requires_grad, values) == (torch.nn.Parameter, True, [1.0] * 3)
        leaf = torch.ones(3, device=DEVICE, requires_grad=True)
        assert partner.ask((describe, leaf))[:2] == (torch.Tensor, True)
        assert partner.ask((describe, torch.empty(0, 3, device=DEVICE)))[-1] == []
        large = torch.empty(2 << 30, dtype=torch.uint8, device=DEVICE)
        large[-1] = 5
        assert partner.ask((_last, large)) == 5
        same, other = base[:2], base[2:4]
        assert partner.ask((_share_one_storage, same, other))


def _last(kept, value):
    return value[-1].item()


def _share_one_storage(kept, a, b):
    return a.untyped_storage()._cdata == b.untyped_storage()._cdata and a.device.index == 1


def _total(kept, value):
    return float(value.to_dense().sum()) if value.layout != torch.strided else float(value.sum())


def _nested_sums(kept, value):
    return [float(t.sum()) for t in value.unbind()]


def _module_sum(kept, module):
    return sum(float(p.sum()) for p in module.parameters())


def test_every_kind_of_tensor_is_shared(context):
    with Partner(context, answer) as partner:
        dense = torch.tensor([[0.0, 2.0], [3.0, 0.0]], device=DEVICE)
        for value in (dense, dense.to_sparse(), dense.to_sparse_csr(), dense.to_sparse_csc()):
            assert partner.ask((_total, value)) == 5
        for layout in (torch.strided, torch.jagged):
            nested = torch.nested.nested_tensor(
                [torch.ones(2, device=DEVICE), torch.ones(3, device=DEVICE)], layout=layout
            )
            assert partner.ask((_nested_sums, nested)) == [2.0, 3.0]
        module = torch.nn.Linear(2, 1, device=DEVICE)
        expected = sum(float(p.sum()) for p in module.parameters())
        assert partner.ask((_module_sum, module)) == pytest.approx(expected)
        for dtype in (torch.bool, torch.int8, torch.bfloat16, torch.complex64, torch.int64):
            value = torch.ones(3, dtype=dtype, device=DEVICE)
            assert partner.ask((describe, value))[2] == dtype
        values = torch.tensor([1 + 2j, 3 - 1j], device=DEVICE)
        for value in (values.conj(), values.conj().imag):
            assert partner.ask((describe, value))[-1] == value.tolist()
        scales, zeros = torch.ones(2, device=DEVICE), torch.zeros(2, dtype=int, device=DEVICE)
        for value in (
            torch.quantize_per_tensor(dense, 0.5, 2, torch.quint8),
            torch.quantize_per_channel(dense, scales, zeros, 0, torch.qint8),
        ):
            assert partner.ask((_dequantized, value)) == dense.tolist()
        mixed = [torch.ones(1), torch.ones(1, device=DEVICE), torch.ones(1, device="openreg:0")]
        assert partner.ask((_devices, mixed)) == ["cpu", DEVICE, "openreg:0"]


def _dequantized(kept, value):
    assert value.is_quantized
    return value.dequantize().tolist()


def _devices(kept, values):
    return [str(value.device) for value in values]


def _grad(kept, parameter):
    (parameter * 2).sum().backward()
    return parameter.grad


def test_gradients_travel_and_non_leaves_are_refused(context):
    with Partner(context, answer) as partner:
        parameter = torch.nn.Parameter(torch.ones(2, device=DEVICE))
        grad = partner.ask((_grad, parameter))
        assert grad.tolist() == [2.0, 2.0] and parameter.grad is None
        with pytest.raises(RuntimeError, match="non-leaf"):
            partner.to.put((keep, parameter * 2))


def give_back(kept, value):
    return value


def test_schedule_runs_what_another_process_waits_for(context):
    with Partner(context, answer) as partner, torch.openreg.testing.schedule("late"):
        value = torch.ones(2, device=DEVICE) * 2
        assert partner.ask((describe, value))[-1] == [2.0, 2.0]


def test_tensor_that_comes_back_is_the_same_storage(context):
    with Partner(context, answer) as first, Partner(context, answer) as second:
        value = torch.ones(4, device=DEVICE)
        for partner in (first, second):
            value2 = partner.ask((give_back, value))
            assert value2.untyped_storage()._cdata == value.untyped_storage()._cdata
        first.ask((keep, value))
        again = second.ask((give_back, first.ask((give_back, value))))
        pointer = value.data_ptr()
        del value, value2
        assert again.data_ptr() == pointer


def _pass_on(reader, writer):
    writer.send(reader.recv())
    with pytest.raises(EOFError):
        reader.recv()


def test_tensor_that_four_processes_pass_on_is_the_same_storage(context):
    value = torch.ones(4, device=DEVICE)
    processes, to, back = _chain(context, 4, _pass_on)
    to.send(value)
    again = back.recv()
    assert again.untyped_storage()._cdata == value.untyped_storage()._cdata
    to.close()
    back.close()
    for process in processes:
        process.join(TIMEOUT)
        assert process.exitcode == 0


def test_shared_block_is_not_reused_before_it_is_released(context):
    with Partner(context, answer) as partner:
        before = stats()
        value = torch.full((1000,), 7.0, device=DEVICE)
        pointer = value.data_ptr()
        partner.ask((keep, value))
        del value
        assert stats()["pending"] == before["pending"] + 1
        others = [torch.zeros(1000, device=DEVICE) for _ in range(20)]
        assert pointer not in [other.data_ptr() for other in others]
        partner.ask((drop,))
        until(lambda: stats()["pending"] == before["pending"])


def test_receiver_waits_on_its_stream_for_the_senders_work(context):
    with Partner(context, answer) as partner:
        value = torch.zeros(1000, device=DEVICE)
        torch.openreg.set_device(1)
        try:
            side = torch.openreg.Stream()
            with side:
                received = partner.ask((_fill_on_a_side_stream, value))
                assert float(received.sum()) == 5000
        finally:
            torch.openreg.set_device(0)


def _fill_on_a_side_stream(kept, value):
    with torch.openreg.Stream(device=1):
        torch.openreg._sleep(200_000_000)
        value.fill_(5)
        queue = mp.get_context("forkserver").Queue()
        queue.put(value)  # its thread has other current streams
    value = queue.get(timeout=TIMEOUT)
    assert torch.openreg.current_stream(1).query() is False
    return value


def test_killed_processes_hold_nothing(context):
    before = stats()
    partner = Partner(context, answer)
    value = torch.ones(1000, device=DEVICE)
    partner.ask((keep, value))
    theirs = partner.ask((_make,))
    del value
    assert stats()["pending"] == before["pending"] + 1
    partner.kill()
    until(lambda: stats()["pending"] == before["pending"])
    assert theirs.tolist() == [3.0, 3.0]  # it outlives the process that made it
    del theirs
    after = stats()
    assert (after["imported"], after["holds"]) == (before["imported"], before["holds"])


def _make(kept):
    return torch.full((2,), 3.0, device=DEVICE)


def test_handle_of_an_ended_process_is_an_error(context):
    with Partner(context, answer) as partner:
        data = partner.ask((_dump,))
    with pytest.raises(RuntimeError, match="help: the sender must live"):
        ForkingPickler.loads(data)


def _dump(kept):
    return bytes(ForkingPickler.dumps(torch.ones(2, device=DEVICE)))


def _rebuild_by_hand(kept, data):
    function, args = pickle.loads(data)
    return function(*args).tolist()


def test_reduce_tensor_gives_what_another_process_calls(context):
    value = torch.arange(6.0, device=DEVICE)[2:]
    function, args = reductions.reduce_tensor(value)
    assert args[6] == 1  # the device, as libraries expect
    assert function(*args).data_ptr() == value.data_ptr()
    with Partner(context, answer) as partner:
        data = pickle.dumps(reductions.reduce_tensor(value))
        for _ in range(2):  # as for two receivers
            assert partner.ask((_rebuild_by_hand, data)) == [2.0, 3.0, 4.0, 5.0]
    args = list(args)
    args[6] = 0
    with pytest.raises(ValueError, match="device of shared openreg memory is 1, got 0"):
        function(*args)


def test_storage_says_that_it_is_shared():
    value = torch.ones(2, device=DEVICE)
    assert value.is_shared() and value.share_memory_().is_shared()
    assert not torch.ones(2).is_shared()


# ---- Events ----


def _record_behind_a_gate(kept, event, value):
    torch.openreg.set_device(1)
    kept["gate"] = gate = torch.openreg.testing.gate()
    gate.wait()
    value.fill_(9)
    event.record()
    return event.query()


def test_event_orders_work_of_two_processes(context):
    event = torch.openreg.Event(interprocess=True, device=1)
    value = torch.zeros(1000, device=DEVICE)
    assert event.query()
    with Partner(context, answer) as partner:
        assert partner.ask((_record_behind_a_gate, event, value)) is False
        stream = torch.openreg.Stream(device=1)
        stream.wait_event(event)
        with stream:
            total = value.sum()
        assert not event.query() and not stream.query()
        partner.ask((drop,))  # opens the gate
        event.synchronize()
        assert event.query() and float(total) == 9000
        handle = event.ipc_handle()
        assert partner.ask((_open_event, handle)) is True
        plain = torch.Event(DEVICE, interprocess=True)
        plain.record()
        plain.synchronize()
        assert partner.ask((_open_event, plain.ipc_handle())) is True
        del event
        with pytest.raises(RuntimeError, match="destroyed"):
            partner.ask((_open_event, handle))
    with pytest.raises(RuntimeError, match="without interprocess=True"):
        torch.openreg.Event().ipc_handle()
    with pytest.raises(ValueError, match="cannot take the time"):
        torch.openreg.Event(interprocess=True, enable_timing=True)


def _open_event(kept, handle):
    plain = torch.Event.from_ipc_handle(torch.device(DEVICE), handle)
    return torch.openreg.Event.from_ipc_handle(1, handle).query() and plain.query()


def _sum_behind_an_event(kept, handle, value):
    event = torch.openreg.Event.from_ipc_handle(0, handle)
    with torch.openreg.device(1):
        event.wait()
        kept["sum"] = value.sum()
        with pytest.raises(RuntimeError, match=r"belongs to openreg:0 .* of openreg:1"):
            event.record()
    torch.openreg.current_stream(0).wait_stream(torch.openreg.current_stream(1))
    with torch.openreg.device(0):
        event.record()
    return event.query()


def test_event_belongs_to_the_device_that_records_it(context):
    event = torch.openreg.Event(interprocess=True)
    assert event.device == torch.device("openreg")
    value = torch.zeros(1000, device=DEVICE)
    with Partner(context, answer) as partner, torch.openreg.device(1):
        gate = torch.openreg.testing.gate()
        gate.wait()
        value.fill_(9)
        event.record()
        assert event.device == torch.device(DEVICE)
        assert partner.ask((_sum_behind_an_event, event.ipc_handle(), value)) is False
        assert not event.query()
        gate.open()
        event.synchronize()  # for the record of the other process
        assert partner.ask((lookup, "sum")) == 9000
        with torch.openreg.device(0), pytest.raises(RuntimeError, match="belongs to openreg:1"):
            event.record()


# ---- Many ----


def test_many_small_tensors_of_one_segment_are_held_at_once(context):
    count = 10_000
    values = [torch.full((2,), float(i), device=DEVICE) for i in range(count)]
    before = stats()["pending"]
    with Partner(context, answer) as partner:
        partner.ask((keep, values))
        del values
        assert stats()["pending"] == before + count
        assert partner.ask((_last_of_kept,)) == [count - 1.0] * 2
        partner.ask((drop,))
        until(lambda: stats()["pending"] == before)


def _last_of_kept(kept):
    return kept[0][-1].tolist()


def _die():
    os.kill(os.getpid(), signal.SIGKILL)


class _EndsItsReader:
    def __reduce__(self):
        return _die, ()


def _read_and_die(connection):
    connection.recv_bytes()
    _die()


def _load_when_asked(connection):
    data = connection.recv_bytes()
    connection.send(None)
    connection.recv()
    connection.send(ForkingPickler.loads(data).tolist())


def _send_and_wait(process, send):
    process.start()
    send(torch.ones(2, device=DEVICE))
    process.join(TIMEOUT)


def test_description_that_a_killed_process_had_read_holds_nothing(context):
    with Partner(context, answer) as partner:  # where no other test has sent anything
        partner.ask((_send_to_killed_processes,))


def _send_to_killed_processes(kept):
    context = mp.get_context("forkserver")
    queue, (ours, theirs) = context.SimpleQueue(), context.Pipe()
    for reader, send in ((queue._reader, queue.put), (theirs, ours.send)):
        _send_and_wait(context.Process(target=_read_and_die, args=(reader,)), send)
        until(lambda: stats()["pending"] == 0)
    arguments = (_EndsItsReader(), torch.ones(2, device=DEVICE))
    process = context.Process(target=print, args=arguments)
    del arguments
    process.start()
    process.join(TIMEOUT)
    until(lambda: stats()["pending"] == 0)
    queue.put(torch.ones(2, device=DEVICE))
    assert stats()["pending"] == 1
    assert queue.get().tolist() == [1.0, 1.0]
    queue.put(torch.ones(2, device=DEVICE))
    queue.close()  # nobody has read it
    until(lambda: stats()["pending"] == 0)


def test_processes_that_hide_their_descriptors_are_readers_if_they_may_have_inherited_them(context):
    with Partner(context, answer) as partner:
        for process in (os.getpid(), partner.process.pid):
            assert _transit._may_have_inherited(process)
        assert partner.ask((_may_have_inherited, os.getpid()))
        assert not partner.ask((_may_have_inherited, os.getppid()))
    for process in (os.getppid(), partner.process.pid):  # an older one, and one that has ended
        assert not _transit._may_have_inherited(process)


def _may_have_inherited(kept, process):
    return _transit._may_have_inherited(process)


def test_description_that_a_living_process_has_read_keeps_its_block(context):
    before = stats()["pending"]
    ours, theirs = context.Pipe()
    process = context.Process(target=_load_when_asked, args=(theirs,))
    process.start()
    ours.send(torch.full((2,), 7.0, device=DEVICE))
    ours.recv()
    assert stats()["pending"] == before + 1
    torch.zeros(2, device=DEVICE)
    ours.send(None)
    assert ours.recv() == [7.0, 7.0]
    process.join(TIMEOUT)
    assert stats()["pending"] == before


class _Dies:
    """Ends the process at the call number `left` of the extension's functions for sharing."""

    def __init__(self, left):
        self.left = left

    def __getattr__(self, name):
        if name.startswith("_ipc"):
            if self.left == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            self.left -= 1
        return getattr(_C, name)


def exchange_and_die(requests, answers, left):
    import torch_openreg._sharing as sharing

    sharing._C = _Dies(left)
    while True:
        value = requests.get()
        answers.put(value + 1)
        answers.put(value)


def _value(get):
    """The one value in what `get` returns, or None if its sender was killed too early."""
    try:
        (value,) = set(get().tolist())
    except RuntimeError as error:
        assert re.search(KILLED, str(error))
        return None
    return value


@pytest.mark.slow
@pytest.mark.parametrize("left", range(20))
def test_process_killed_at_a_point_leaves_the_other_usable(context, left):
    before = stats()
    partner = Partner(context, exchange_and_die, left)
    # Both ends of a pipe are the partner's and ours, so its death is no end of file.
    while partner.process.is_alive():
        value = torch.full((64,), 1.0, device=DEVICE)
        partner.to.put(value)
        del value
        answers = 0
        deadline = time.monotonic() + TIMEOUT
        while answers < 2 and partner.process.is_alive() and time.monotonic() < deadline:
            if partner.back._reader.poll(0.01):
                assert _value(partner.back.get) in (None, 1.0, 2.0)
                answers += 1
    partner.process.join(TIMEOUT)
    for queue in (partner.to, partner.back):  # a message that nobody reads holds our memory
        while queue._reader.poll(0.1):
            message = queue._reader.recv_bytes()  # get() takes a lock that the dead may hold
            assert _value(partial(ForkingPickler.loads, message)) in (None, 1.0, 2.0)
    after = stats()
    assert (after["imported"], after["holds"]) == (before["imported"], before["holds"])
    assert after["pending"] == before["pending"]
    assert (torch.ones(4, device=DEVICE) + 1).tolist() == [2.0] * 4


def _forward(reader, writer):
    with contextlib.suppress(EOFError, BrokenPipeError, ConnectionResetError):
        while True:
            with contextlib.suppress(RuntimeError):  # its sender has been killed
                value = reader.recv()
                writer.send(value + 1)
                writer.send(value)


def _chain(context, length, body):
    """Processes that send on what they get, and our two ends."""
    reader, ours = context.Pipe(duplex=False)
    processes = []
    for _ in range(length):
        after, writer = context.Pipe(duplex=False)
        process = context.Process(target=body, args=(reader, writer))
        process.start()
        processes.append(process)
        reader.close()
        writer.close()
        reader = after
    return processes, ours, reader


def _talk(to, back):
    """Sends and receives until the other processes have ended."""
    with contextlib.suppress(EOFError, OSError):
        while True:
            with contextlib.suppress(BrokenPipeError):
                to.send(torch.ones(64, device=DEVICE))
            while back.poll(0.001):
                assert _value(back.recv) in (None, 1.0, 2.0, 3.0)


def _names():
    return {name for name in os.listdir("/dev/shm") if "torch" in name or "openreg" in name}


ROUNDS = int(os.environ.get("OPENREG_SHARING_ROUNDS", "12"))


@pytest.mark.slow
def test_rounds_of_killed_processes_leave_nothing(context):
    random = Random(ROUNDS)
    names = _names()
    event = torch.openreg.Event(interprocess=True)  # opens a file
    for round_ in range(ROUNDS + 1):
        processes, to, back = _chain(context, 2, _forward)
        to.send(torch.ones(64, device=DEVICE))
        assert set(back.recv().tolist()) == {3.0}
        victims = random.choice([processes, processes[:1], processes[1:], []])
        timer = threading.Timer(random.uniform(0, 0.02), _kill, [victims or processes])
        if not victims:
            os.kill(resource_tracker._resource_tracker._pid, signal.SIGKILL)
        timer.start()
        _talk(to, back)
        timer.join()
        to.close()
        back.close()
        for process in processes:
            process.join(TIMEOUT)
        del timer, process, processes, victims, to, back
        if round_ == 0:
            first = _held()
        # A thread may still close a killed process's connection.
        until(lambda first=first: _held() == first)
        assert _names() == names
    del event


def _held():
    return stats(), len(os.listdir("/proc/self/fd")), torch.openreg.memory_allocated(1)


def _kill(processes):
    for process in processes:
        os.kill(process.pid, signal.SIGKILL)


@pytest.mark.slow
def test_hundred_thousand_tensors_pass_three_processes(context):
    with Partner(context, answer) as first, Partner(context, answer) as second:
        before = stats()["pending"]
        for i in range(1000):
            values = [torch.full((2,), float(i), device=DEVICE) for _ in range(100)]
            back = second.ask((give_back, first.ask((give_back, values))))
            assert back[99].data_ptr() == values[99].data_ptr()
        del values, back
        until(lambda: stats()["pending"] == before)


SEGMENTS = """
import os, pickle, resource, sys
import torch
from torch.multiprocessing.reductions import reduce_tensor

resource.setrlimit(resource.RLIMIT_NOFILE, (1024, 1024))
requests, answers = os.pipe(), os.pipe()
if os.fork() == 0:
    os.close(requests[1])
    with os.fdopen(requests[0], "rb") as file:
        sent = pickle.load(file)
    values = [function(*args)[0].item() for function, args in sent]
    os.write(answers[1], str(values == list(range(0, 2 * len(values), 2))).encode())
    os._exit(0)
values = [torch.empty(1 << 18, device="openreg") for _ in range(4000)]  # two in a segment
for i, value in enumerate(values):
    value[0] = i
sent = []
try:
    for value in values[::2]:
        sent.append(reduce_tensor(value))
except RuntimeError as error:
    assert "ulimit -n" in str(error), error
else:
    raise AssertionError("no error")
with os.fdopen(requests[1], "wb") as file:
    pickle.dump(sent, file)
os.close(answers[1])
print(len(sent) > 500, os.read(answers[0], 99).decode(), values[-1][0].item())
"""


@pytest.mark.slow
def test_segments_past_the_limit_of_files_are_refused_and_others_intact(run):
    done = run(SEGMENTS)
    assert done.out.split() == ["True", "True", "3999.0"], done.err


AS_CUDA = """
import os, pickle
import torch
import torch_openreg
from torch.multiprocessing import reductions

torch_openreg.as_cuda()
requests, answers = os.pipe(), os.pipe()
if os.fork() == 0:
    shared, args = pickle.loads(os.read(requests[0], 1 << 16))
    storage = torch.UntypedStorage._new_shared_cuda(*shared)
    value = reductions.rebuild_cuda_tensor(*args)
    assert value.untyped_storage().data_ptr() == storage.data_ptr()
    value.mul_(2)
    torch.cuda.synchronize()
    os.write(answers[1], str(value.device).encode())
    os._exit(0)
value = torch.arange(4.0, device="cuda")
function, args = reductions.reduce_tensor(value)
os.write(requests[1], pickle.dumps((value.untyped_storage()._share_cuda_(), args)))
os.close(answers[1])
print(os.read(answers[0], 99).decode(), value.tolist())
del value
torch.cuda.ipc_collect()
"""


def test_cudas_functions_share_storages_as_cuda(run):
    done = run(AS_CUDA)
    assert (done.out, done.err) == ("cuda:0 [0.0, 2.0, 4.0, 6.0]\n", ""), done.err


RACE = """
import torch
from torch.multiprocessing.reductions import reduce_tensor
from torch_openreg.openreg import sanitizer

x = torch.ones(4, device="openreg")
with sanitizer.enable():
    reduce_tensor(x)
    x + 1
    try:
        x.add_(1)
    except sanitizer.DataRaceError as error:
        assert "another process holds this memory" in str(error), error
    else:
        raise AssertionError("no report")
    y = torch.ones(4, device="openreg")
    reduce_tensor(y)
    event = torch.openreg.Event(interprocess=True)
    event.record()
    event.wait()
    y.add_(1)
"""


def test_write_to_memory_that_another_process_holds_is_a_race(run):
    done = run(RACE)
    assert (done.code, done.err) == (0, ""), done.err
