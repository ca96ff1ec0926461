"""Searches of explore(): all schedules with few preemptions, split tasks; orders that were seen."""

import re

import pytest
import torch
from test_schedules import MISSING_WAIT

from torch_openreg import _C

testing = torch.openreg.testing
explore, schedule = testing.explore, testing.schedule
pytestmark = pytest.mark.simulated_device("no completion comes from outside of its schedules")


# ---- all schedules with few preemptions ----


def alternates(same=0, others=0):
    """Wrong only if a, b, a, b. Tasks between are of the same memory, or `others` of their own."""
    streams = torch.openreg.Stream(), torch.openreg.Stream()
    at, seen = torch.zeros(2, device="openreg"), torch.zeros(4, device="openreg")
    own = torch.zeros(2, 4, device="openreg")
    torch.openreg.synchronize()
    for i, stream in enumerate(streams):
        with stream:
            for turn in range(2):
                for _ in range(same):
                    at[i].add_(0)
                for _ in range(others):
                    own[i].add_(1)
                seen[2 * i + turn].copy_(at[1 - i])
                at[i].add_(1)
    torch.openreg.synchronize()
    return seen


def under(seed, fn):
    with schedule(seed):
        value = fn()
    return value.cpu() if isinstance(value, torch.Tensor) else value


ALTERNATION = [0.0, 1.0, 1.0, 2.0]


@pytest.mark.racy
@pytest.mark.parametrize("same", [0, 1, 3])
def test_search_with_one_preemption_finds_an_alternation(same):
    found = explore(lambda: alternates(same), preemptions=1, limit=200)
    (wrong,) = [r for r in found.results if r.value.tolist() == ALTERNATION]
    tapes = [seed for result in found.results for seed in result.seeds]
    assert found.complete and found.preemptions == 1 and found.same
    if same <= 1:
        assert found.runs <= 60
    for _ in range(20):
        assert under(wrong.seeds[0], lambda: alternates(same)).tolist() == ALTERNATION
    assert len(set(tapes)) == len(tapes) == found.runs


@pytest.mark.racy
def test_search_prints_the_tape_and_the_race():
    found = explore(lambda: alternates(), preemptions=1)
    text = str(found)
    tape = found.results[1].seeds[0]
    assert re.match(
        r"all \d+ schedules with at most 1 preemption of \d+ tasks on \d streams, "
        r"\d+ results\n  \d+ were run, ",
        text,
    )
    if not _C._sanitizer_active():
        assert "\nerror: data race on openreg:0" in text and "test_search.py:" in text
        assert "testing/_schedules.py" not in text
    assert f"explore(fn, schedules=['{tape}'])\n" in text
    assert text.endswith(f"OPENREG_SCHEDULE_TAPE={tape.removeprefix('tape:')}")


def test_search_runs_independent_tasks_once():
    def fn():
        streams = [torch.openreg.Stream() for _ in range(2)]
        x = torch.ones(2, 4, device="openreg")
        for row, stream in zip(x, streams, strict=True):
            stream.wait_stream(torch.openreg.current_stream())
            with stream:
                row.mul_(2).add_(1)
        torch.openreg.synchronize()
        return x

    found = explore(fn, preemptions=2)
    assert found.ok and found.complete and found.runs == 2 and found.same > 50, found
    assert str(found).startswith(
        f"all {1 + found.same} schedules with at most 2 preemptions of {found.tasks} tasks on "
        f"{found.streams} streams agree\n"
        f"  1 were run, {found.same} are known to be the same as one of them\n"
    )


@pytest.mark.racy
def test_search_predicts_the_results_it_does_not_run():
    """Each schedule that was not run gives the result that it was taken to give."""
    from torch_openreg.openreg.testing import _tapes

    known = _tapes.Search._known_of
    taken = []
    try:
        _tapes.Search._known_of = lambda self, *a: (
            taken.append((a[0], known(self, *a))) or taken[-1][1]
        )
        found = explore(lambda: alternates(), preemptions=1)
    finally:
        _tapes.Search._known_of = known
    same = [(tape, outcome) for tape, outcome in taken if outcome]
    assert len(same) == found.same > 20
    for tape, (outcome,) in same:
        value = under(f"tape:{_tapes.text_of(tape)}", alternates)
        assert value.tolist() == outcome.value.tolist()


@pytest.mark.racy
def test_search_preempts_the_host_too():
    """Only a copy that has run before the host goes on shows it: a wait is missing behind it."""

    def fn():
        host = torch.zeros(4).pin_memory()
        host.copy_(torch.ones(4, device="openreg"), non_blocking=True)
        return host.clone()

    found = explore(fn, preemptions=1)
    assert {r.value[0].item() for r in found.results} == {0.0, 1.0} and found.complete


@pytest.mark.racy
def test_search_poisons_what_an_earlier_run_has_left():
    """Without, the memory has the values of the run before, or zeros."""

    def fn():
        side = torch.openreg.Stream()
        x = torch.zeros(4, device="openreg")
        with side:
            y = x * 1
        torch.openreg.synchronize()
        return y[0].item()

    found = explore(fn, preemptions=0)
    assert any(r.value != r.value for r in found.results), found
    (tape,) = [r.seeds[0] for r in found.results if r.value != r.value]
    with schedule(tape):
        value = fn()
    assert value != value
    assert torch.zeros(4, device="openreg").sum().item() == 0 and not _C._poison(False)


def reads_too_early(keeps=None):
    """Fresh memory, unless the main stream's kernel comes first."""
    side, x = torch.openreg.Stream(), torch.full((64,), 1.0, device="openreg")
    with side:
        y = x + 1
    torch.openreg.synchronize()
    if keeps is not None:
        keeps.append(x)
    return y[0].item()


def reads_what_was_dropped():
    """The next tensor's values, if that has its memory."""
    side, x = torch.openreg.Stream(), torch.full((256,), 1.0, device="openreg")
    side.wait_stream(torch.openreg.current_stream())
    with side:
        y = x + 1
    del x
    z = torch.full((64,), 5.0, device="openreg")
    torch.openreg.synchronize()
    return z[0].item() and y[0].item()


def outcomes(found):
    return [(result.seeds, result.same, repr(result)) for result in found.results]


@pytest.mark.racy
@pytest.mark.parametrize("fn", [reads_too_early, reads_what_was_dropped])
def test_tape_does_not_depend_on_what_the_process_holds(fn):
    """What is alive keeps its segment, with gaps in which are values of before."""
    found = explore(fn, preemptions=1)
    tapes = {r.seeds[0]: r.value for r in found.results}
    assert len(tapes) > 1
    alive = [torch.ones(128, device="openreg") for _ in range(100)]
    del alive[::2]
    for _ in range(20):
        fn(), torch.openreg.synchronize()
        for tape, value in tapes.items():
            assert repr(under(tape, fn)) == repr(value), tape
    assert outcomes(explore(fn, preemptions=1)) == outcomes(found)


@pytest.mark.racy
def test_search_does_not_depend_on_what_its_runs_keep():
    kept = []
    found = explore(reads_too_early, preemptions=1)
    keeps = explore(lambda: reads_too_early(kept), preemptions=1)
    assert outcomes(keeps) == outcomes(found) and len(kept) == found.runs


def lies_in(segments, address):
    return any(0 <= address - s["address"] < s["total_size"] for s in segments)


def test_memory_from_before_is_handed_out_again_after_a_schedule():
    alive = [torch.ones(128, device="openreg") for _ in range(3)]
    gap = alive[1].data_ptr()
    torch.openreg.synchronize()
    del alive[1]
    with schedule("early"):
        before = torch.openreg.memory_snapshot()  # of what it has not given back
        inside = torch.ones(128, device="openreg").data_ptr()
        assert not lies_in(before, inside) and lies_in(before, gap)
    assert lies_in(before, torch.ones(128, device="openreg").data_ptr())


@pytest.mark.racy
def test_search_that_is_cut_off_is_marked_incomplete(capsys):
    found = explore(lambda: alternates(), preemptions=2, limit=3, progress=True)
    assert not found.complete and found.runs == 4 and found.left > 0
    assert re.match(
        rf"\d+ of at least {found.runs - 1 + found.same + found.left} schedules with", str(found)
    )
    bar = capsys.readouterr().err
    assert "\rexplore 1 runs, 0 the same, " in bar and bar.endswith("\n")


def test_search_covers_programs_with_gates_it_cannot_follow():
    def fn():
        gate = testing.gate()
        side = torch.openreg.Stream()
        gate.wait(side)
        x = torch.ones(3, device="openreg")
        side.wait_stream(torch.openreg.current_stream())
        with side:
            y = x + 1
        gate.open()
        side.synchronize()
        return y

    found = explore(fn, preemptions=1)
    assert found.ok and found.complete and found.runs > 4 and not found.same, found


def test_search_covers_a_function_that_fails():
    def fn():
        x = torch.ones(3, device="openreg")
        x[torch.tensor([7], device="openreg")]

    found = explore(fn, preemptions=0)
    assert not found.ok and isinstance(found.results[0].error, IndexError)
    assert torch.ones(2, device="openreg").sum().item() == 2


def test_search_refuses_bad_bounds():
    for bad in (1.5, True, "1"):
        with pytest.raises(TypeError, match=f"preemptions must be a whole number, not {bad!r}"):
            explore(lambda: None, preemptions=bad)
    with pytest.raises(ValueError, match="preemptions must be at least 0, not -1"):
        explore(lambda: None, preemptions=-1)
    with pytest.raises(ValueError, match="limit must be at least 1, not 0"):
        explore(lambda: None, preemptions=1, limit=0)
    with pytest.raises(ValueError, match="or preemptions, not both"):
        explore(lambda: None, 7, preemptions=1)
    for bad in ("tape:", "tape:1,", "tape:x", "1,2"):
        with pytest.raises(ValueError, match="a schedule is a whole number"):
            schedule(bad)


def test_tape_setting_replays_a_tape(run_ok):
    program = f"{MISSING_WAIT}\nprint(torch.openreg.testing.explore(race, preemptions=1))"
    text = run_ok(program, {"OPENREG_SANITIZER": "0"})
    tape = re.search("OPENREG_SCHEDULE_TAPE=(.*)", text)[1]
    value = re.search(rf"(?s)'tape:{tape}'.*?:\s+(\S+)\n", text)[1]
    environment = {"OPENREG_SCHEDULE_TAPE": tape, "OPENREG_SANITIZER": "0"}
    for _ in range(2):
        assert run_ok(f"{MISSING_WAIT}\nprint(race())", environment) == f"{value}\n"


@pytest.mark.racy
@pytest.mark.parametrize("fillers", [1, 2])
def test_search_finds_an_alternation_with_other_tasks_between(fillers):
    """Fillers of their own add orders, and no run; those that touch the same, a few."""
    found = explore(lambda: alternates(others=fillers), preemptions=1)
    assert found.complete and found.runs <= 60
    assert any(r.value.tolist() == ALTERNATION for r in found.results), found


# ---- split tasks ----


def reads_beside(write):
    """Whether what another stream reads is of one write: it is, unless that is half done."""
    a, b = torch.openreg.Stream(), torch.openreg.Stream()
    x, y = torch.zeros(2, 4, device="openreg"), torch.ones(2, 4, device="openreg")
    torch.openreg.synchronize()
    with a:
        write(x, y)
    with b:
        read = x.clone()
    torch.openreg.synchronize()
    return len(read.unique()) == 1


WRITES = {
    "in place": lambda x, y: x.add_(1),
    "in place, a number of the host": lambda x, y: x.add_(torch.tensor(1.0)),
    "out": lambda x, y: torch.add(x, y[0], out=x),
    "fill": lambda x, y: x.fill_(1),
    "copy": lambda x, y: x.copy_(y),
    "strided copy": lambda x, y: x.t().copy_(y.t()),
}


@pytest.mark.racy
@pytest.mark.parametrize("write", WRITES)
def test_search_finds_a_split_update_and_repeats_it(write):
    found = explore(lambda: reads_beside(WRITES[write]), preemptions=1)
    assert found.complete and found.results[0].value is True
    (split,) = [r for r in found.results if r.value is False]
    for _ in range(20):
        with schedule(split.seeds[0]):
            assert not reads_beside(WRITES[write])


@pytest.mark.racy
def test_search_finds_a_split_read():
    """The kernel that reads, with a fresh result, is the one that is split."""

    def fn():
        a, b = torch.openreg.Stream(), torch.openreg.Stream()
        x = torch.zeros(1, 8, device="openreg")
        torch.openreg.synchronize()
        with a:
            y = (x * 2 + 1).sum(0)
        with b:
            x.add_(1)
        torch.openreg.synchronize()
        return len(y.unique())

    found = explore(fn, preemptions=1)
    assert {r.value for r in found.results} == {1, 2} and found.complete, found


@pytest.mark.racy
def test_search_finds_a_missing_wait_around_a_replay():
    def program(ordered):
        x, side = torch.zeros(4, device="openreg"), torch.openreg.Stream()
        graph = torch.openreg.Graph()
        with torch.openreg.graph(graph):
            x.add_(1)
        side.wait_stream(torch.openreg.current_stream())
        with torch.openreg.stream(side):
            graph.replay()
        if ordered:
            torch.openreg.current_stream().wait_stream(side)
        y = x.clone()
        torch.openreg.synchronize()
        return y.cpu()

    assert explore(lambda: program(True)).ok
    assert not explore(lambda: program(False)).ok


def test_seeds_split_tasks_too():
    found = explore(lambda: reads_beside(WRITES["copy"]), 100)
    (split,) = [r for r in found.results if r.value is False]
    assert {seed % 4 for seed in split.seeds} == {2}
    for _ in range(20):
        with schedule(split.seeds[0]):
            assert not reads_beside(WRITES["copy"])


def test_split_operators_give_the_cpus_results():
    """Each operator in two halves, against native CPU."""

    def fn(device):
        x = torch.arange(-12.0, 12.0, device=device).reshape(2, 3, 4)
        y, column = x.cos(), torch.arange(3.0, device=device)[:, None]
        out = torch.empty(2, 3, 4, device=device)
        results = [x + y, x * column, x > y, torch.where(x > 0, x, column), -x]
        results += [torch.add(x, column, alpha=2, out=out), x.to(torch.float16), x.int() // 3]
        results += [x.transpose(0, 2).exp(), (x + 1j * y).conj() * 2, torch.clamp(x, -1, 1)]
        results += [x[:, 1].clone().mul_(3), x[0, 0, :1] + 1, x[:1, :1] * y[:1, :1], x.new_zeros(3)]
        return results

    expected = fn("cpu")
    for seed in ("tape:0", 2, 6):
        with schedule(seed):
            for result, right in zip(fn("openreg"), expected, strict=True):
                assert result.dtype == right.dtype and result.stride() == right.stride()
                assert torch.equal(result.cpu(), right)


# ---- what is said ----


def adds_twice(wait=False):
    """Two streams add to one number: a race that no result shows."""
    a, b = torch.openreg.Stream(), torch.openreg.Stream()
    x = torch.zeros(1, device="openreg")
    torch.openreg.synchronize()
    for stream in (a, b):
        with stream:
            x.add_(1)
        if wait:
            b.wait_stream(a)
    torch.openreg.synchronize()
    return x.item()


@pytest.mark.racy
def test_search_prints_a_race_that_no_result_shows():
    by_seeds, search = explore(adds_twice, 20), explore(adds_twice, preemptions=1)
    assert by_seeds.ok and search.ok
    if _C._sanitizer_active():
        return
    for found in (by_seeds, search):
        said = " ".join(str(found).split())
        assert " agree, but the sanitizer reports under 'early': " in said
        assert "\nerror: data race on openreg:0" in str(found)
        assert [report.later.operator for report in found.races] == ["aten::add_.Tensor"]
    right = explore(lambda: adds_twice(wait=True), 20)
    assert right.ok and not right.races
    assert str(right).startswith("21 schedules of 4 tasks on 3 streams, one result\n")


@pytest.mark.racy
def test_seeds_count_the_orders_they_have_seen():
    found = explore(adds_twice, 50)
    assert found.orders == (2, 2)
    assert "  orders of the tasks that touch the same memory: 2 seen, of 2\n" in str(found)
    assert explore(lambda: adds_twice(wait=True), 10).orders == (1, 1)
    seen, possible = explore(lambda: alternates(), 50).orders
    assert 2 < seen < possible
    assert explore(lambda: alternates(), preemptions=2).runs <= possible + 2  # and "early"

    def asks():
        x = torch.ones(1, device="openreg")
        torch.openreg.current_stream().query()
        return x.sum().item()

    seen, possible = explore(asks, 10).orders
    assert possible is None
