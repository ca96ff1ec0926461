"""Kernels that fail: the CPU kernel's exception, once, at the next call that synchronises."""

import re
import sys
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch.openreg import testing

from torch_openreg.openreg.device import synchronize_all

DEVICE = "openreg:0"
OTHER = "openreg:1"
two_devices = pytest.mark.skipif("torch.openreg.device_count() < 2")


def _index(*values, device=DEVICE):
    return torch.tensor(values, device=device)


X = torch.rand(4, 3)
GOOD = torch.eye(3)
BAD = -torch.eye(3)


def on(other):
    """X beside another tensor, without waiting."""
    return X.to(other.device, non_blocking=True)


# name: (operator in the text, type, text, call, good argument, bad argument)
FAILURES = {
    "index_select": (
        "index_select", IndexError, "index out of range",
        lambda i: on(i).index_select(0, i), torch.tensor([0, 3]), torch.tensor([0, 4]),
    ),
    "embedding": (
        "embedding", IndexError, "index out of range",
        lambda i: F.embedding(i, on(i)), torch.tensor([1, 2]), torch.tensor([1, 9]),
    ),
    "nll_loss": (
        "nll_loss", IndexError, "Target 7 is out of bounds",
        lambda t: F.nll_loss(on(t), t), torch.tensor([0, 1, 2, 0]),
        torch.tensor([0, 1, 7, 0]),
    ),
    "cholesky": (
        "cholesky", torch.linalg.LinAlgError, "not positive-definite",
        lambda a: torch.cholesky(a), GOOD, BAD,
    ),
    "index": (
        "index", IndexError, "index 8 is out of bounds",
        lambda i: on(i)[i], torch.tensor([0, 3]), torch.tensor([0, 8]),
    ),
    "gather": (
        "gather", RuntimeError, "index 5 is out of bounds",
        lambda i: on(i).gather(0, i), torch.tensor([[0, 1, 2]]), torch.tensor([[0, 5, 2]]),
    ),
    "index_add_": (
        "index_add", RuntimeError, "index 4 is out of bounds",
        lambda i: on(i).clone().index_add_(0, i, on(i)[:2]),
        torch.tensor([0, 3]), torch.tensor([0, 4]),
    ),
}  # fmt: skip


def fail(device=DEVICE, name="embedding"):
    """Queues a kernel that fails; the same shapes have succeeded before."""
    _, _, _, call, good, bad = FAILURES[name]
    with torch.openreg.device(device):
        good, bad = good.to(device), bad.to(device)
        call(good)
        torch.openreg.synchronize()
        return call(bad)


def fail_ahead(runs_ahead, name="embedding"):
    _, _, _, call, good, bad = FAILURES[name]
    good, bad = good.to(DEVICE), bad.to(DEVICE)
    call(good)
    torch.openreg.synchronize()
    return runs_ahead(lambda: call(bad))


@pytest.fixture(autouse=True)
def nothing_left():
    """No test leaves an error behind, and the device still works."""
    yield
    for index in range(torch.openreg.device_count()):
        torch.openreg.synchronize(index)
        assert (torch.ones(3, device=f"openreg:{index}") + 1).sum().item() == 6


@pytest.mark.parametrize("name", FAILURES)
def test_kernel_error_has_the_cpus_type_and_names_its_operator(runs_ahead, name):
    operator, kind, text, call, good, bad = FAILURES[name]
    with pytest.raises(kind, match=text):
        call(bad)  # what the CPU does
    fail_ahead(runs_ahead, name)
    with pytest.raises(kind, match=text) as caught:
        torch.openreg.synchronize()
    assert type(caught.value) is kind
    assert operator in str(caught.value) and DEVICE in str(caught.value)
    torch.openreg.synchronize()  # once
    assert torch.equal(call(good.to(DEVICE)).cpu(), call(good))


def test_linalg_wrappers_raise_a_kernels_error_at_the_call():
    with pytest.raises(torch.linalg.LinAlgError, match="not positive-definite"):
        torch.linalg.cholesky(BAD.to(DEVICE))
    with pytest.raises(torch.linalg.LinAlgError, match="singular"):
        torch.linalg.inv(torch.zeros(2, 2, device=DEVICE))


SYNCHRONISING = {
    "synchronize": lambda x: torch.openreg.synchronize(),
    "accelerator": lambda x: torch.accelerator.synchronize(),
    "stream": lambda x: torch.accelerator.current_stream().synchronize(),
    "item": lambda x: x.sum().item(),
    "tolist": lambda x: x.tolist(),
    "cpu": lambda x: x.cpu(),
    "to_pinned": lambda x: torch.empty(3).pin_memory().copy_(x),
    "nonzero": lambda x: x.nonzero(),
    "bool": lambda x: bool(x[0]),
    "event": lambda x: torch.accelerator.current_stream().record_event().synchronize(),
}
if not hasattr(torch.ops.aten, "cholesky"):  # PyTorch 2.14 removed it
    del FAILURES["cholesky"]


@pytest.mark.parametrize("name", SYNCHRONISING)
def test_synchronising_call_reports_a_kernels_error_once(runs_ahead, name):
    x = torch.ones(3, device=DEVICE)
    SYNCHRONISING[name](x)
    fail_ahead(runs_ahead)
    with pytest.raises(IndexError, match="embedding"):
        SYNCHRONISING[name](x)
    SYNCHRONISING[name](x)


def test_queries_records_and_waits_never_report_a_kernels_error(eventually):
    fail()
    stream, side = torch.accelerator.current_stream(), torch.Stream(DEVICE)
    eventually(stream.query)
    event = torch.Event(DEVICE)
    event.record(stream)
    eventually(event.query)
    side.wait_event(event)
    side.wait_stream(stream)
    eventually(side.query)
    y = torch.ones(3, device=DEVICE) + 1  # nor does an operator
    y.record_stream(side)
    del y
    torch.openreg.memory_allocated()
    with pytest.raises(IndexError, match="embedding"):
        torch.openreg.synchronize()


def test_later_tasks_run_and_the_first_failure_is_reported(runs_ahead):
    x = torch.zeros(3, device=DEVICE)
    i, bad_target = FAILURES["embedding"][5].to(DEVICE), FAILURES["nll_loss"][5].to(DEVICE)
    fail_free = FAILURES["embedding"][3], FAILURES["nll_loss"][3]
    fail_free[0](FAILURES["embedding"][4].to(DEVICE))
    fail_free[1](FAILURES["nll_loss"][4].to(DEVICE))

    def run():
        x.add_(1)
        fail_free[0](i)
        x.add_(1)
        fail_free[1](bad_target)
        x.add_(1)

    runs_ahead(run)
    with pytest.raises(IndexError, match="embedding") as caught:
        torch.openreg.synchronize()
    assert "(and 1 more failed after it)" in str(caught.value)
    assert x.tolist() == [3] * 3
    fail()
    with pytest.raises(IndexError) as caught:
        torch.openreg.synchronize()
    assert "more failed" not in str(caught.value)


SYNCHRONISED = [n for n in ("embedding", "nll_loss", "cholesky", "embedding") if n in FAILURES]


def test_failure_in_between_is_not_taken_for_an_earlier_one():
    for name in SYNCHRONISED:
        operator, kind, text = FAILURES[name][:3]
        fail(name=name)
        with pytest.raises(kind, match=text) as caught:
            torch.openreg.synchronize()
        assert operator in str(caught.value)


def test_failure_on_a_side_stream_is_reported(runs_ahead):
    side = torch.Stream(DEVICE)
    with side:
        fail_ahead(runs_ahead)
    with pytest.raises(IndexError, match="embedding"):
        side.synchronize()


@two_devices
def test_failure_of_one_device_does_not_reach_the_other():
    y = torch.ones(3, device=OTHER)
    fail()
    torch.openreg.synchronize(1)
    assert (y + 1).tolist() == [2] * 3
    y.nonzero()
    with pytest.raises(IndexError, match=r"raised by embedding on openreg:0"):
        torch.openreg.synchronize(0)
    torch.openreg.synchronize(1)


@two_devices
def test_failure_is_kept_for_each_device():
    fail(OTHER, "nll_loss")
    fail(DEVICE, "embedding")
    with pytest.raises(IndexError, match=r"nll_loss\w* on openreg:1"):
        torch.openreg.synchronize(1)
    with pytest.raises(IndexError, match=r"raised by embedding on openreg:0"):
        torch.openreg.synchronize(0)


def test_first_call_with_new_shapes_fails_as_asynchronously(runs_ahead):
    x = torch.rand(17, 3, device=DEVICE)
    indices = _index(40, 2, 3, 1, 1, 0, 2)
    runs_ahead(lambda: F.embedding(indices, x))
    with pytest.raises(IndexError, match="out of range"):
        torch.openreg.synchronize()


def test_bad_shapes_are_refused_at_the_call(runs_ahead):
    x = torch.ones(3, 4, device=DEVICE)

    def run():
        with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
            x @ x
        with pytest.raises(RuntimeError, match="must match the size"):
            x + x.t()
        with pytest.raises(IndexError, match="Dimension out of range"):
            x.sum(5)
        with pytest.raises(RuntimeError, match="result type Float can't be cast"):
            torch.zeros(3, dtype=torch.long, device=DEVICE).copy_(x[:, 0]).div_(2)
        return x + 1

    try:
        assert runs_ahead(run).sum().item() == 24
    finally:
        torch.openreg.synchronize()


@pytest.mark.parametrize("name", ["index_select", *dict.fromkeys(SYNCHRONISED)])
def test_training_goes_on_after_a_kernels_error(name):
    """What the CPU makes of the same program, which catches the error and takes the next batch."""
    operator, kind, text, call, good, bad = FAILURES[name]

    def train(device):
        torch.manual_seed(0)
        net = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
        net.to(device)
        optimizer = torch.optim.Adam(net.parameters(), lr=0.05)
        losses = []
        for attempt, x in enumerate(torch.rand(6, 5, 6).to(device)):
            try:
                optimizer.zero_grad()
                aside = call((bad if attempt == 3 else good).to(device)).sum()
                loss = net(x).square().sum() + aside * 0
                loss.backward()
                losses.append(loss.item())
                optimizer.step()
            except kind as error:
                assert attempt == 3 and re.search(text, str(error))
                assert device == "cpu" or operator in str(error)
        return torch.tensor(losses)

    expected, got = train("cpu"), train(DEVICE)
    assert len(expected) == 5
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)


def test_error_of_a_kernel_in_backward_is_raised():
    class Break(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * 1

        @staticmethod
        def backward(ctx, gradient):
            return fail(name="embedding").sum() * gradient

    x = torch.ones(3, device=DEVICE, requires_grad=True)
    Break.apply(x).sum().backward()
    with pytest.raises(IndexError, match="embedding"):
        torch.openreg.synchronize()


CHILD = """
    import torch
    import torch.nn.functional as F
    x = torch.rand(4, 3, device="openreg")
    def call(*values):
        return F.embedding(torch.tensor(values, device="openreg"), x)
    call(1, 2)
    torch.openreg.synchronize()
"""


def test_launch_blocking_raises_a_kernels_error_at_the_call(run_ok):
    out = run_ok(
        CHILD
        + """
    try:
        call(1, 9)
        print("queued")
    except IndexError as error:
        text = str(error)
        print("raised at the launch", "index out of range" in text, "embedding" in text)
    torch.openreg.synchronize()
    print((x * 0 + 1).sum().item())
    y = x + 1
    print(torch.openreg.current_stream().query())
    try:
        torch.zeros(4, device="openreg").index_add_(
            0, torch.tensor([7], device="openreg"), torch.ones(1, device="openreg"))
        print("queued")
    except IndexError as error:
        print("raised at the launch", "index_add" in str(error))
    torch.openreg.synchronize()
    """,
        env={"OPENREG_LAUNCH_BLOCKING": "1"},
    )
    assert out.splitlines() == [
        "raised at the launch True True", "12.0", "True", "raised at the launch True",
    ]  # fmt: skip


WARNS = """
    import warnings
    import torch
    torch.set_warn_always(True)
    x = torch.rand(1, device="openreg").expand(6)
    i = torch.tensor([2, 1, 0], device="openreg")
    for _ in range(2):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            x.index_fill_(0, i, 1.0)
            at_the_call = len(caught)
            torch.openreg.synchronize()
            print(at_the_call, len(caught))
    warnings.simplefilter("error")
    try:
        x.index_fill_(0, i, 1.0)
        print("queued")
        torch.openreg.synchronize()
    except UserWarning as warning:
        print("expanded" in str(warning))
"""


@pytest.mark.parametrize("blocking", [True, False])
def test_launch_blocking_gives_a_kernels_warning_at_the_call(run_ok, blocking):
    """Without it that of the first call does, which a dry run has found."""
    out = run_ok(WARNS, env={"OPENREG_LAUNCH_BLOCKING": str(int(blocking))})
    assert out.splitlines() == (
        ["1 1", "1 1", "True"] if blocking else ["1 1", "0 1", "queued", "True"]
    )


def test_error_without_launch_blocking_comes_at_synchronisation(run_ok):
    out = run_ok(
        CHILD
        + """
    call(1, 9)
    print("queued")
    try:
        torch.openreg.synchronize()
    except IndexError as error:
        print("embedding" in str(error))
    """
    )
    assert out.splitlines() == ["queued", "True"]


def test_failure_that_is_never_asked_for_ends_a_program_quietly(run_ok):
    assert run_ok(CHILD + "\n    call(1, 9)\n    print('done')\n") == "done\n"


def test_reset_forgets_the_failure():
    fail()
    torch.openreg.reset(0)
    torch.openreg.synchronize()
    fail(name="nll_loss")
    with pytest.raises(IndexError, match="Target 7"):
        torch.openreg.synchronize()


# ---- Checks that the caller asks for ----


def segments(lengths, check):
    return torch.segment_reduce(on(lengths)[:, 0], "sum", lengths=lengths, unsafe=not check)


def with_check(name):
    function = getattr(torch.linalg, name)
    return lambda a, check: function(a, check_errors=check)


# name: (call, good argument, bad argument)
CHECKED = {
    name: (with_check(name), GOOD, torch.zeros(3, 3))
    for name in ("cholesky_ex", "inv_ex", "ldl_factor_ex", "lu_factor_ex")
}
CHECKED["solve_ex"] = (
    lambda a, check: torch.linalg.solve_ex(a, a[0], check_errors=check), GOOD, torch.zeros(3, 3),
)  # fmt: skip
CHECKED["segment_reduce"] = (segments, torch.tensor([1, 3, 0, 0]), torch.tensor([1, 2, 0, 0]))


# What does not converge, or is no standard deviation, is raised by the call whoever asks.
def always_checked(name):
    function = getattr(torch.linalg, name)
    return lambda a, check: function(a)


ALWAYS_CHECKED = {
    name: (always_checked(name), torch.eye(3), torch.full((3, 3), float("nan")))
    for name in ("eig", "eigh", "eigvalsh", "svd", "svdvals")
}


ALWAYS_CHECKED["normal"] = (
    lambda std, check: torch.normal(0.0, std), torch.ones(3), -torch.ones(3),
)  # fmt: skip


@pytest.mark.parametrize("name", [*CHECKED, *ALWAYS_CHECKED])
def test_checked_argument_is_refused_by_the_call(name):
    call, good, bad = {**CHECKED, **ALWAYS_CHECKED}[name]
    with pytest.raises(RuntimeError) as expected:
        call(bad, True)
    for _ in range(2):
        call(good.to(DEVICE), True)
        with pytest.raises(type(expected.value)) as caught:
            call(bad.to(DEVICE), True)
        assert str(caught.value).splitlines()[0] == str(expected.value).splitlines()[0]
        torch.openreg.synchronize()


@pytest.mark.parametrize("name", CHECKED)
def test_unchecked_argument_is_queued(runs_ahead, name):
    call, good, bad = CHECKED[name]
    for argument in (bad, good, bad) if name != "segment_reduce" else (good,) * 2:
        there = argument.to(DEVICE)
        runs_ahead(lambda a=there: call(a, False))
        torch.openreg.synchronize()


# ---- Failures and warnings ----


def test_indices_that_are_bytes_are_warned_of_at_each_call(runs_ahead):
    x, values = torch.ones(4, 3, device=DEVICE), torch.zeros(2, 3, device=DEVICE)
    index = _index(1, 0, 1, 0).byte()

    def call():
        for _ in range(2):
            x[index] = values

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        runs_ahead(call)
    assert ["dtype torch.uint8 is now deprecated" in str(w.message) for w in caught] == [True] * 2
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        torch.openreg.synchronize()


WARNED = "on expanded tensors is deprecated"


def test_bounds_that_a_dtype_does_not_hold_are_warned_of_at_each_call(runs_ahead):
    x = torch.empty(4, device=DEVICE)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        runs_ahead(lambda: [x.random_(0, 2**30) for _ in range(2)])
    assert ["to - 1 is out of bounds" in str(w.message) for w in caught] == [True] * 2


# What raises, with a warning of an earlier kernel kept.
BESIDE_WARNINGS = {
    "synchronize": (
        lambda bad: F.embedding(bad, GOOD.to(DEVICE, non_blocking=True)),
        torch.openreg.synchronize,
    ),
    "waits": (
        lambda bad: F.embedding(bad, GOOD.to(DEVICE, non_blocking=True)),
        lambda: X.to(DEVICE).nonzero(),
    ),
    "is_waited_for": (lambda bad: None, lambda: (torch.arange(1, device=DEVICE) - 1).bincount()),
}


@pytest.mark.parametrize("action", ["always", "error"])
@pytest.mark.parametrize("name", BESIDE_WARNINGS)
def test_failure_is_raised_whatever_becomes_of_warnings(runs_ahead, request, action, name):
    queue, call = BESIDE_WARNINGS[name]
    good, bad = _index(0, 1), _index(0, 7)
    expanded = torch.ones(1, device=DEVICE).expand(3)
    expanded.index_fill_(0, good, 1)
    queue(good)
    torch.openreg.synchronize()
    torch.set_warn_always(True)
    request.addfinalizer(lambda: torch.set_warn_always(False))
    runs_ahead(lambda: (expanded.index_fill_(0, good, 1), queue(bad)))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter(action)
        with pytest.raises((IndexError, RuntimeError), match=r"index out of range|bincount"):
            call()
    assert [WARNED in str(w.message) for w in caught] == ([True] if action == "always" else [])
    torch.openreg.synchronize()


def test_failure_counted_with_another_is_not_raised_later():
    x, bad, good = torch.ones(4, device=DEVICE), _index(9), _index(1)
    with testing.inject("kernel_error"):
        x.add_(1)
        x.index_select(0, bad)
        with pytest.raises(RuntimeError, match=r"(?s)add_? .*injected.*1 more failed"):
            torch.openreg.synchronize()
    with testing.inject("kernel_error"):
        x.index_select(0, good)
        with pytest.raises(RuntimeError, match=r"(?s)index_select .*injected"):
            torch.openreg.synchronize()


def test_reported_failure_is_distinguished_from_others_of_its_operator():
    x, bad, good = torch.ones(4, device=DEVICE), _index(9), _index(1)
    with testing.inject("kernel_error"):
        x.index_select(0, good)
        x.index_select(0, bad)
        with pytest.raises(RuntimeError, match=r"(?s)index_select .*injected.*1 more failed"):
            torch.openreg.synchronize()


def test_failure_text_may_look_like_that_of_a_report():
    text = "the pool is spent (3 more failed after it)"
    torch._assert_async(torch.zeros(1, device=DEVICE), text)
    with pytest.raises(RuntimeError, match=f"(?s)^{re.escape(text)}\n.*raised by _assert_async"):
        torch.openreg.synchronize()


@two_devices
def test_all_devices_are_synchronised_after_an_error_of_one():
    for device, bad in ((DEVICE, 7), (OTHER, 8)):
        torch.zeros(3, device=device)[_index(bad, device=device)]
    with pytest.raises(IndexError, match="index 7 is out of bounds") as raised:
        synchronize_all()
    if sys.version_info >= (3, 11):
        assert "and IndexError: index 8 is out of bounds" in raised.value.__notes__[0]
    synchronize_all()


def test_tools_synchronise_where_a_test_has_replaced_torch_device(runs_ahead, monkeypatch):
    torch.openreg.current_stream()
    monkeypatch.setattr(torch, "device", None)
    synchronize_all()
