"""Schedules: a race shows under some seed and repeats under it; what is right is so under all."""

import collections
import dataclasses
import gc
import importlib.util
import itertools
import math
import re
import threading
import time
import types
from pathlib import Path

import numpy
import pytest
import torch
from torch import nn

from torch_openreg import _C

testing = torch.openreg.testing
explore, schedule = testing.explore, testing.schedule
ROOT = Path(__file__).resolve().parents[2]
SEEDS = ["late", *range(8)]  # for programs that are right

MISSING_WAIT = """
import torch

def race(wait=False):
    x = torch.zeros(4, device="openreg")
    side = torch.openreg.Stream()
    x.add_(1)
    if wait:
        side.wait_stream(torch.openreg.current_stream())
    with side:
        y = x * 5
    side.synchronize()
    return y[0].item()
"""
_program = {}
exec(MISSING_WAIT, _program)
race = _program["race"]


def assert_right(fn, seeds=SEEDS):
    found = explore(fn, seeds)
    assert found.ok, str(found)
    assert len(found.results[0].seeds) == 1 + len(seeds)
    return found.results[0].value


# ---- wrong programs ----


@pytest.mark.simulated_device("no completion comes from outside of its schedules")
@pytest.mark.racy
def test_missing_wait_shows_both_results_and_the_seeds():
    found = explore(race, schedules=24)
    assert not found.ok
    right, wrong = found.results
    assert (right.value, wrong.value) == (5.0, 0.0)
    assert right.seeds[0] == "early" and wrong.seeds == found.different
    assert sorted([*right.seeds[1:], *wrong.seeds]) == list(range(24))
    assert 2 <= len(wrong.seeds) <= 22
    for seed in (wrong.seeds[0], wrong.seeds[-1], right.seeds[1]):
        again = explore(race, schedules=[seed])
        assert again.different == ([seed] if seed in wrong.seeds else [])
    text = str(found)
    assert re.match(r"25 schedules of \d+ tasks on 2 streams, 2 results\n  orders of the ", text)
    assert "  'early', " in text
    assert f"  {wrong.seeds[0]}, {wrong.seeds[1]}" in text and ": 0.0" in text
    assert text.endswith(
        f"to replay: torch.openreg.testing.explore(fn, schedules=[{wrong.seeds[0]}])"
    )


def test_program_with_its_wait_has_one_result():
    found = explore(lambda: race(wait=True), schedules=24)
    assert found.ok and " on 2 streams, one result\n" in str(found), found


@pytest.mark.simulated_device("no completion comes from outside of its schedules")
def test_seed_means_the_same_in_another_process(run_ok):
    """In new ones: here, a thread that an earlier test has left may call the API at any moment."""
    program = f"{MISSING_WAIT}\nprint(torch.openreg.testing.explore(race, schedules=24))"
    first, second = (run_ok(program, {"OPENREG_SANITIZER": "0"}) for _ in range(2))
    assert "2 results" in first and second == first


def test_schedule_setting_decides_for_a_process(run_ok):
    program = f"{MISSING_WAIT}\nprint([race() for _ in range(10)])"
    late, early, one, again = (
        run_ok(program, {"OPENREG_SCHEDULE_SEED": seed, "OPENREG_SANITIZER": "0"})
        for seed in ("late", "early", "1", "1")
    )
    assert late.startswith("[0.0, ") and early == f"{[5.0] * 10}\n"
    assert one == again


@pytest.mark.racy
def test_missing_record_stream_shows():
    def fn(record):
        side = torch.openreg.Stream()
        x = torch.full((1024,), 1.0, device="openreg")
        side.wait_stream(torch.openreg.current_stream())
        with side:
            y = x + 0
        if record:
            x.record_stream(side)
        del x
        torch.full((1024,), 7.0, device="openreg")
        torch.openreg.synchronize()
        return y[0].item()

    assert {r.value for r in explore(lambda: fn(False), 24).results} == {1.0, 7.0}
    assert explore(lambda: fn(True), 24).ok


@pytest.mark.racy
def test_host_that_reads_too_early_shows():
    def fn():
        host = torch.zeros(4).pin_memory()
        host.copy_(torch.ones(4, device="openreg"), non_blocking=True)
        return host.clone()

    found = explore(fn, schedules=24)
    # And half of them, where the copy is split.
    assert {tuple(r.value.tolist()) for r in found.results} >= {(0.0,) * 4, (1.0,) * 4}


def test_query_that_is_taken_for_granted_shows():
    def fn():
        torch.ones(4, device="openreg").add_(1)
        return torch.openreg.current_stream().query()

    assert {r.value for r in explore(fn, schedules=24).results} == {True, False}


# ---- right programs ----


def test_producer_and_consumer_have_one_result():
    def fn():
        produce, consume = torch.openreg.Stream(), torch.openreg.Stream()
        results = []
        for i in range(20):
            with produce:
                x = torch.full((100,), float(i), device="openreg") * 2
                ready = produce.record_event()
            with consume:
                consume.wait_event(ready)
                results.append((x + 1).sum())
                x.record_stream(consume)
            del x
        consume.synchronize()
        return [int(r.item()) for r in results]

    assert assert_right(fn) == [100 * (2 * i + 1) for i in range(20)]


def test_training_with_adam_has_one_result():
    def fn():
        model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1)).to("openreg")
        optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
        x = torch.randn(32, 8, device="openreg")
        losses = []
        for _ in range(4):
            loss = (model(x) - x.sum(1, keepdim=True)).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())
        return torch.stack(losses)

    losses = assert_right(fn)
    assert losses[-1] < losses[0]


def test_backward_over_two_streams_has_one_result():
    def fn():
        side = torch.openreg.Stream()
        x = torch.arange(6.0, device="openreg").requires_grad_()
        y = x * 2
        side.wait_stream(torch.openreg.current_stream())
        with side:
            z = y.square()
        torch.openreg.current_stream().wait_stream(side)
        z.sum().backward()
        return x.grad

    assert torch.equal(assert_right(fn), 8 * torch.arange(6.0))


def test_digits_example_with_prefetching_has_one_result():
    spec = importlib.util.spec_from_file_location("digits", ROOT / "docs/examples/digits.py")
    digits = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(digits)
    images, labels = torch.randn(5 * 16, 1, 8, 8), torch.arange(80) % 10
    device = torch.device("openreg:1")

    def fn():
        model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(144, 10))
        model.to(device)
        optimizer = torch.optim.Adam(model.parameters())
        batches = zip(images.split(16), labels.split(16), strict=True)
        told = []  # the last loss alone would round most of what differs away
        for image, label in digits.Prefetcher(device).batches(batches):
            loss = nn.functional.cross_entropy(model(image), label)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            told += [loss, *(parameter.grad for parameter in model.parameters())]
        return told

    assert_right(fn, ["late", *range(4)])


def test_copies_of_pinned_memory_and_both_devices_have_one_result():
    source = torch.arange(1000.0).pin_memory()

    def fn():
        side = torch.openreg.Stream(0)
        with side:
            x = source.to("openreg:0", non_blocking=True)
            y = (x + 1).to("openreg:1", non_blocking=True)
        torch.openreg.current_stream(1).wait_stream(side)
        z = y.view(10, 100).t() * 2
        there = torch.empty(100, 10).pin_memory()
        there.copy_(z, non_blocking=True)
        torch.openreg.current_stream(1).synchronize()
        return there

    assert torch.equal(assert_right(fn), (source + 1).view(10, 100).t() * 2)


def test_copies_in_pieces_have_one_result():
    source = torch.arange(4 << 20, dtype=torch.int32)

    def fn():
        x = source.to("openreg")
        y = x.clone()
        x.zero_()
        return y.to("openreg:1").sum()

    assert assert_right(fn, ["late", 0, 1]) == source.sum()


def test_polling_ends_under_a_schedule():
    def fn():
        side = torch.openreg.Stream()
        with side:
            x = torch.ones(10, device="openreg")
            for _ in range(20):
                x = x + 1
        event = side.record_event()
        while not event.query():
            pass
        while not torch.openreg.current_stream().query() or not side.query():
            pass
        return x

    assert_right(fn)


def test_gate_that_another_thread_opens_has_one_result():
    def fn():
        stream = torch.openreg.Stream()
        gate = testing.gate()
        gate.wait(stream)
        with stream:
            x = torch.ones(3, device="openreg") + 1
        thread = threading.Thread(target=lambda: (time.sleep(0.02), gate.open()))
        thread.start()
        stream.synchronize()
        thread.join()
        return x

    assert_right(fn, ["late", 0, 1, 2])


def test_operators_that_wait_have_one_result():
    def fn():
        side = torch.openreg.Stream()
        with side:
            x = torch.arange(10, device="openreg")
            picked = x[x > 4]
            return picked.unique(), torch.linalg.inv(torch.eye(3, device="openreg")), x.sum().item()

    assert_right(fn)


def test_threads_come_to_an_end_under_a_schedule():
    def work(results, i):
        with torch.openreg.Stream(i % 2):
            x = torch.zeros(10, device=f"openreg:{i % 2}")
            for _ in range(20):
                x = x + 1
            results[i] = x.sum().item()

    def fn():
        results = [None] * 4
        threads = [threading.Thread(target=work, args=(results, i)) for i in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return results

    assert assert_right(fn, ["late", 0, 1, 2]) == [200.0] * 4


# ---- schedule() and explore() themselves ----


def test_schedules_nest_and_end():
    outside = _C._schedule_get()
    with schedule(3):
        assert _C._schedule_get() == (1, 3)
        with schedule("late"):
            x = torch.zeros(3, device="openreg")
            assert not torch.openreg.current_stream().query()
        assert _C._schedule_get() == (1, 3)
        assert torch.openreg.current_stream().query()
    assert _C._schedule_get() == outside
    with pytest.raises(KeyError), schedule(4):
        raise KeyError
    assert _C._schedule_get() == outside

    @schedule("early")
    def early():
        torch.zeros(3, device="openreg").add_(1)
        return torch.openreg.current_stream().query()

    assert early() and early()
    assert x.sum().item() == 0


def test_threads_may_leave_a_schedule_in_any_order():
    outside, (first, second) = _C._schedule_get(), (schedule(3), schedule(5))
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert _C._schedule_get() == (1, 5)
    second.__exit__(None, None, None)
    assert _C._schedule_get() == outside
    with first, second, first:  # one object, twice
        assert _C._schedule_get() == (1, 3)
    assert _C._schedule_get() == outside


def test_schedule_that_cannot_begin_leaves_nothing(monkeypatch):
    outside = _C._schedule_get()
    torch.zeros(1, device="openreg")

    def interrupt():
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(torch.openreg, "empty_cache", interrupt)
        with pytest.raises(KeyboardInterrupt), schedule("late"):
            pass
    assert _C._schedule_get() == outside
    with schedule(3):
        assert _C._schedule_get() == (1, 3)
    assert _C._schedule_get() == outside


def test_errors_count_as_results():
    def fn(bad):
        x = torch.ones(3, device="openreg")
        side = torch.openreg.Stream()
        with side:  # does not wait for x
            if side.query() and bad:
                raise ValueError(f"{x.numel()} elements")
        x[torch.tensor([7], device="openreg")]  # fails in its kernel

    found = explore(lambda: fn(False), 3)
    assert not found.ok and found.different == ["early", 0, 1, 2]
    (result,) = found.results
    assert isinstance(result.error, IndexError) and "raises IndexError: " in str(found)
    found = explore(lambda: fn(True), ["late"])
    assert {type(r.error) for r in found.results} == {ValueError}
    assert "raises ValueError: 3 elements" in str(found)
    assert torch.ones(2, device="openreg").sum().item() == 2


def test_results_are_compared_by_value():
    nan = float("nan")
    assert explore(
        lambda: {"a": [torch.tensor([1.0, nan], device="openreg"), nan], "b": (3,)}, 3
    ).ok
    for first, second in (
        (torch.zeros(2), torch.ones(2)),
        (torch.zeros(2), torch.zeros(2, dtype=torch.float64)),
        (torch.zeros(2), torch.zeros(1, 2)),
        (torch.zeros(2, 2).to_sparse(), torch.eye(2).to_sparse()),
        ([0], [0, 0]),
        (torch.zeros(1), 0.0),
    ):
        found = explore(iter([first, second]).__next__, 1)
        assert found.different == [0] and len(found.results) == 2


@dataclasses.dataclass(frozen=True)
class Output:
    loss: object
    more: object = None


RESULTS = {
    "long array": lambda x: numpy.full(5000, float(x)),
    "array of objects": lambda x: numpy.array([None, x], dtype=object),
    "array of records": lambda x: numpy.array([(math.nan, x)], dtype=[("a", float), ("b", int)]),
    "long list": lambda x: [*range(5000), x],
    "dataclass": lambda x: Output(torch.full((3,), float(x), device="openreg")),
    "close numbers in dataclasses": lambda x: Output(Output(torch.tensor(1 + x * 1e-5)), [x]),
    "jagged": lambda x: torch.nested.nested_tensor(
        [torch.ones(2, device="openreg"), torch.full((3,), x * 1.0, device="openreg")],
        layout=torch.jagged,
    ),
    "complex": lambda x: torch.tensor([complex(math.nan, x)], device="openreg"),
    "sets": lambda x: {1, 2, 3 + x},
}


@pytest.mark.parametrize("make", RESULTS.values(), ids=RESULTS)
def test_results_are_compared_by_structure(make):
    assert explore(lambda: make(1.0), [0]).ok
    assert explore(iter([make(1.0), make(2.0)]).__next__, [0]).different == [0]


def test_results_that_change_later_are_kept_as_they_were():
    values, array, output = [], numpy.zeros(2), Output([0])

    def call():
        values.append(len(values))
        array[0] += 1
        output.loss[0] += 1
        return values, array, output

    found = explore(call, 2)
    assert [len(result.value[0]) for result in found.results] == [1, 2, 3]
    assert [result.value[1][0] for result in found.results] == [1, 2, 3]
    assert [result.value[2].loss[0] for result in found.results] == [1, 2, 3]


class Slotted:
    __slots__ = ("me", "x")


class Batch(list):
    pass


def changes(value, change):
    """Returns the same object in each run, changed."""
    runs = itertools.count()

    def call():
        change(value, next(runs))
        return value

    return call


def set_slots(value, x):
    value.me, value.x = value, x  # the object refers to itself


def set_parameter(module, x):
    with torch.no_grad():
        module.weight.fill_(x)


CHANGED = {
    "module": lambda: (nn.Linear(2, 2).to("openreg"), set_parameter),
    "set": lambda: (set(), set.add),
    "counter": lambda: (collections.Counter(), lambda c, x: c.update(n=x)),
    "bytearray": lambda: (bytearray(1), bytearray.append),
    "namespace": lambda: (types.SimpleNamespace(), lambda n, x: vars(n).update(x=x)),
    "mapping": lambda: (collections.UserDict(), lambda d, x: d.update(x=x)),
    "list subclass": lambda: (Batch(), Batch.append),
    "slots": lambda: (Slotted(), set_slots),
    "attribute that is no field": lambda: (Output(0), lambda o, x: vars(o).update(x=x)),
    "storage": lambda: (
        torch.zeros(2, dtype=torch.uint8, device="openreg").untyped_storage(),
        lambda s, x: s.fill_(x),
    ),
    "mask": lambda: (numpy.ma.zeros(4), lambda a, x: a.__setitem__(x, numpy.ma.masked)),
    "sign of zero": lambda: ([0.0], lambda a, x: a.__setitem__(0, -a[0])),
    "sign of a tensor's zero": lambda: (torch.zeros(1), lambda a, x: a.neg_()),
    "sign of an array's zero": lambda: (numpy.zeros(1), lambda a, x: numpy.negative(a, out=a)),
}


@pytest.mark.parametrize("make", CHANGED.values(), ids=CHANGED)
def test_changed_object_is_not_compared_with_itself(make):
    value, change = make()
    assert explore(changes(value, change), [0]).different == [0]


def test_unchanged_object_is_equal_to_itself():
    values = [make()[0] for make in CHANGED.values()]
    assert explore(lambda: values, [0]).ok


def test_results_that_cannot_be_compared_raise():
    stream = torch.openreg.Stream()
    bits = torch.zeros(2, dtype=torch.uint8).view(torch.bits8)
    for make, kind in (
        (lambda: (x for x in ()), "generator"),
        (lambda: [stream], "Stream"),
        (lambda: {"a": lambda: 0}, "function"),
        (lambda: bits, "Tensor"),
    ):
        with pytest.raises(TypeError, match=f"cannot compare results of type {kind} "):
            explore(make, [0])
    one = numpy.ma.masked_array([1.0, math.nan], mask=[True, True])
    same = one, Output, torch.float32, torch.device("openreg"), explore, {math.nan, torch.ones(1)}
    assert explore(lambda: same, 1).ok


def test_explore_begins_each_run_with_the_same_random_state():
    before = torch.get_rng_state(), torch.openreg.get_rng_state()
    assert explore(lambda: (torch.rand(2), torch.rand(2, device="openreg")), 3).ok
    assert torch.equal(before[0], torch.get_rng_state())
    assert torch.equal(before[1], torch.openreg.get_rng_state())


def test_explore_shows_progress_when_asked(capsys):
    explore(lambda: None, 3, progress=True)
    bar = capsys.readouterr().err
    assert bar.count("\r") == 4 and bar.endswith(
        "[##############################] 4/4, results: 1\n"
    )
    explore(lambda: None, 3)
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("seed", [-1, 2**64, "soon", 1.5, None, True])
def test_schedule_refuses_a_bad_seed(seed):
    message = r"whole number from 0 to 2\*\*64 - 1, 'late' or 'early', not "
    with pytest.raises(ValueError, match=message + repr(seed)):
        schedule(seed)
    with pytest.raises(ValueError, match=message):
        explore(lambda: None, [seed])


@pytest.mark.parametrize("error", [AssertionError, KeyboardInterrupt])
def test_exception_in_a_schedule_does_not_wait(error):
    """The traceback keeps the gate, so it stays closed until the exception is dropped."""
    outside = _C._schedule_get()

    def fails():
        gate = testing.gate()
        x = torch.ones(3, device="openreg")
        gate.wait()
        kept.append(x.add_(1))
        raise error

    kept = []
    with pytest.raises(error) as info, schedule("late"):
        fails()
    assert _C._schedule_get() == outside and not torch.openreg.current_stream().query()
    info = None  # noqa: F841
    gc.collect()
    assert kept[0].tolist() == [2.0] * 3


def test_forked_child_of_a_schedule_is_refused_a_device(run_ok):
    said = run_ok(
        """
        import os
        import torch

        with torch.openreg.testing.schedule(3):
            x = torch.ones(3, device="openreg")
            x.add_(1)
            child = os.fork()
            if not child:
                try:
                    torch.ones(3, device="openreg")
                except RuntimeError as error:
                    assert "forked subprocess" in str(error)
        if not child:
            os._exit(7)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
        print(x.tolist())
        """
    )
    assert said == "[2.0, 2.0, 2.0]\n"


@pytest.mark.parametrize("seed", ["late", "early", "0", "5"])
def test_process_under_a_schedule_ends_with_queued_work(run_ok, seed):
    run_ok(
        """
        import threading
        import torch

        x, side = torch.ones(3, device="openreg"), torch.openreg.Stream()
        gate = torch.openreg.testing.gate()
        gate.wait(side)
        for _ in range(50):
            x.add_(1)
        with side:
            y = x + 1
        threading.Thread(target=side.synchronize, daemon=True).start()
        while "host thread" not in torch.openreg.hang_report():
            pass
        """,
        {"OPENREG_SCHEDULE_SEED": seed},
    )


def test_explore_returns_the_error_of_a_function_that_always_raises():
    def fn():
        torch.ones(3, device="openreg").add_(1)
        raise LookupError("always")

    found = explore(fn, 3)
    assert not found.ok and found.different == ["early", 0, 1, 2] and len(found.results) == 1
    before = _C._schedule_get()
    for error in (KeyboardInterrupt, SystemExit):
        with pytest.raises(error):
            explore(lambda error=error: (_ for _ in ()).throw(error), 3)
        assert _C._schedule_get() == before
    with pytest.raises(TypeError, match="to call, not None"):
        explore(None, 3)


@pytest.mark.parametrize("name", ["OPENREG_LAUNCH_BLOCKING", "CUDA_LAUNCH_BLOCKING"])
def test_explore_is_refused_where_launches_block(run_ok, name):
    code = """
import torch, torch_openreg
from torch.openreg.testing import explore
for how in ({"schedules": 2}, {"preemptions": 1}):
    try:
        print(explore(lambda: torch.ones(1, device="openreg").item(), **how))
    except RuntimeError as error:
        print("each launch waits" in str(error), end=" ")
"""
    env = {name: "1", "OPENREG_AS_CUDA": str(int(name.startswith("CUDA")))}
    assert run_ok(code, env).split() == ["True", "True"]


@pytest.mark.parametrize("schedules", ["late", True, 2.5, None])
def test_explore_refuses_what_is_no_number_of_schedules(schedules):
    message = f"how many seeds, or the seeds, not {re.escape(repr(schedules))}"
    with pytest.raises(TypeError, match=message):
        explore(lambda: None, schedules)


def test_explore_refuses_a_bad_number_of_schedules():
    with pytest.raises(ValueError, match="at least 1, not 0"):
        explore(lambda: None, 0)
    with pytest.raises(ValueError, match=r"at least one seed, not \[\]"):
        explore(lambda: None, [])


@pytest.mark.racy
def test_race_reports_count_as_one_result():
    def scale():
        x, side = torch.ones(10, device="openreg"), torch.openreg.Stream()
        with side:
            x.mul_(5)

    def add():
        x, side = torch.ones(10, device="openreg"), torch.openreg.Stream()
        with side:
            x.add_(5)

    with torch.openreg.sanitizer.enable():
        found = explore(scale, 3)
        other = explore(add, [1])
    (result,) = found.results
    assert result.seeds == ["early", 0, 1, 2] == found.different
    assert result.error.report.later.operator.startswith("aten::mul_")
    assert result != other.results[0]
