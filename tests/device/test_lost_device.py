"""A lost device: torch.AcceleratorError until torch.openreg.reset brings it back."""

import threading

import device_loss
import pytest
import torch
from device_loss import lose, queue_loss

import torch_openreg  # noqa: F401

DEVICE = "openreg:0"
OTHER = "openreg:1"
TEXT = (
    r"openreg:0 is lost: lost failed\n  help: torch.openreg.reset\(0\) "
    "brings it back"
)
two_devices = pytest.mark.skipif("torch.openreg.device_count() < 2")


def lost(text=TEXT):
    return pytest.raises(torch.AcceleratorError, match=text)


@pytest.fixture(autouse=True)
def brought_back():
    """Each test begins and ends with devices that work."""
    yield
    for index in range(torch.openreg.device_count()):
        torch.openreg.reset(index)
        assert (torch.ones(3, device=f"openreg:{index}") + 1).sum().item() == 6


def test_lost_device_error_has_type_text_and_code():
    queue_loss()
    for _ in range(3):  # it stays
        with lost() as caught:
            torch.openreg.synchronize()
        assert type(caught.value) is torch.AcceleratorError
        assert isinstance(caught.value, RuntimeError)
        assert caught.value.error_code == device_loss.CODE
        assert str(caught.value).startswith("orErrorDeviceLost: openreg:0")


def backward(x):
    torch.autograd.grad(BACKWARD["loss"], BACKWARD["leaf"])


BACKWARD = {}

USES = {
    "synchronize": lambda x: torch.openreg.synchronize(),
    "accelerator": lambda x: torch.accelerator.synchronize(),
    "stream": lambda x: torch.openreg.Stream(0).synchronize(),
    "event": lambda x: torch.accelerator.current_stream().record_event().synchronize(),
    "item": lambda x: x[0].item(),
    "tolist": lambda x: x.tolist(),
    "cpu": lambda x: x.cpu(),
    "to_pinned": lambda x: torch.empty(3).pin_memory().copy_(x, non_blocking=True),
    "from_cpu": lambda x: x.copy_(torch.ones(3)),
    "add": lambda x: x + 1,
    "add_out": lambda x: torch.add(x, 1, out=x),
    "inplace": lambda x: x.zero_(),
    "clone": lambda x: x.clone(),
    "new_shape": lambda x: torch.cumsum(x.expand(7, 3), 1),
    "waited": lambda x: x.nonzero(),
    "random": lambda x: x.uniform_(),
    "empty": lambda x: torch.empty(5, device=DEVICE),
    "large": lambda x: torch.empty(1 << 20, device=DEVICE),
    "ones": lambda x: torch.ones(5, device=DEVICE),
    "tensor": lambda x: torch.tensor([1.0], device=DEVICE),
    "sleep": lambda x: torch.openreg._sleep(1),
    "backward": backward,
}


@pytest.mark.parametrize("name", USES)
def test_lost_device_raises_at_every_use(name):
    x = torch.ones(3, device=DEVICE)
    leaf = torch.ones(3, device=DEVICE, requires_grad=True)
    BACKWARD.update(leaf=leaf, loss=(leaf * x).sum())
    lose()
    for _ in range(2):
        with lost():
            USES[name](x)
    torch.openreg.reset(0)
    BACKWARD.update(loss=(leaf * x).sum())
    USES[name](x)


def test_lost_device_is_reported_after_a_queued_loss(runs_ahead):
    x = torch.ones(3, device=DEVICE)
    runs_ahead(lambda: (x.add_(1), queue_loss(), x.add_(1)))
    with lost():
        x.sum().item()


def test_lost_device_raises_in_backward():
    class Lose(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * 1

        @staticmethod
        def backward(ctx, gradient):
            lose()
            return gradient * 2

    x = torch.ones(3, device=DEVICE, requires_grad=True)
    with lost():
        Lose.apply(x).sum().backward()
    assert x.grad is None


def test_lost_device_is_not_reported_by_queries_records_and_deleters(eventually):
    x = torch.ones(3, device=DEVICE)
    stream, side = torch.accelerator.current_stream(), torch.Stream(DEVICE)
    lose()
    eventually(stream.query)
    event = torch.Event(DEVICE)
    event.record(stream)
    eventually(event.query)
    side.wait_event(event)
    side.wait_stream(stream)
    eventually(side.query)
    x.record_stream(side)
    assert x[1:].view(2, 1).shape == (2, 1) and x.data_ptr()
    assert "openreg:0" in str(x.device)
    del x
    torch.openreg.empty_cache()
    torch.openreg.memory_stats()
    torch.openreg.mem_get_info()
    torch.openreg.get_device_properties(0)
    with lost():
        torch.openreg.synchronize()


def test_lost_device_error_comes_before_a_kernels_failure():
    table = torch.rand(4, 3, device=DEVICE)

    def look_up(index):
        return torch.embedding(table, torch.tensor([index], device=DEVICE))

    look_up(1)
    torch.openreg.synchronize()
    look_up(9)
    lose()
    with lost():
        torch.openreg.synchronize()
    torch.openreg.reset(0)
    torch.openreg.synchronize()
    look_up(8)
    with pytest.raises(IndexError, match="embedding"):
        torch.openreg.synchronize()


@two_devices
def test_lost_device_leaves_the_other_device_usable():
    y = torch.ones(3, device=OTHER)
    lose(0)
    torch.openreg.synchronize(1)
    assert (y + torch.ones(3, device=OTHER)).tolist() == [2] * 3
    y.requires_grad_().sum().backward()
    assert y.grad.tolist() == [1] * 3
    torch.openreg.reset(1)
    with lost():
        torch.openreg.synchronize(0)


@two_devices
def test_lost_devices_are_reset_one_by_one():
    lose(0)
    lose(1)
    torch.openreg.reset(0)
    assert torch.ones(3, device=DEVICE).sum().item() == 3
    with lost(r"(?s)openreg:1 is lost.*torch.openreg.reset\(1\)"):
        torch.openreg.synchronize(1)


@two_devices
def test_lost_device_refuses_copies_between_devices():
    x, y = torch.ones(3, device=DEVICE), torch.ones(3, device=OTHER)
    lose(0)
    with lost():
        y.copy_(x)
    with lost():
        x.copy_(y)
    assert y.tolist() == [1] * 3


@two_devices
def test_lost_device_leaves_nothing_waiting_for_ever(eventually):
    x, y = torch.zeros(3, device=DEVICE), torch.zeros(3, device=OTHER)
    torch.openreg.synchronize(0)
    held, side = torch.openreg.Stream(0), torch.openreg.Stream(0)
    there = torch.openreg.current_stream(1)
    with torch.openreg.testing.gate() as gate:
        gate.wait(held)
        with held:
            x.add_(1)
            event = held.record_event()
        side.wait_event(event)
        there.wait_event(event)
        with torch.openreg.device(1):
            y.add_(1)
        with side:
            x.add_(1)
        assert not there.query() and not side.query()
        lose()
        there.synchronize()  # with the gate closed
        assert y.tolist() == [1] * 3
        eventually(lambda: event.query() and side.query() and held.query())


WAITING = {
    "synchronize": lambda x, stream: stream.synchronize(),
    "device": lambda x, stream: torch.openreg.synchronize(0),
    "event": lambda x, stream: stream.record_event().synchronize(),
    "item": lambda x, stream: x[0].item(),
    "waited": lambda x, stream: x.nonzero(),
    "full": lambda x, stream: [x.add_(1) for _ in range(5000)],
}


@pytest.mark.parametrize("name", WAITING)
def test_lost_device_wakes_a_thread_that_waits(name):
    x, stream = torch.ones(3, device=DEVICE), torch.openreg.Stream(0)
    stream.wait_stream(torch.openreg.current_stream(0))
    outcome = []

    def wait():
        with stream:
            try:
                WAITING[name](x, stream)
            except BaseException as error:
                outcome.append(error)

    with torch.openreg.testing.gate() as gate:
        gate.wait(stream)
        thread = threading.Thread(target=wait)
        thread.start()
        thread.join(0.1)
        assert thread.is_alive()
        lose()
        thread.join(20)
        assert not thread.is_alive()
    assert [type(error) for error in outcome] == [torch.AcceleratorError]


# ---- reset -----------------------------------------------------------------------------------


def test_reset_keeps_tensors_streams_and_events(eventually):
    x = torch.ones(3, device=DEVICE)
    stream, event = torch.openreg.Stream(0), torch.Event(DEVICE)
    address = x.data_ptr()
    for _ in range(3):
        lose()
        torch.openreg.reset(0)
        with stream:
            x.fill_(2)
            event.record()
        event.synchronize()
        assert x.tolist() == [2] * 3 and x.data_ptr() == address
        eventually(stream.query)


def test_reset_of_a_healthy_device_changes_nothing():
    x = torch.ones(3, device=DEVICE)
    for device in (None, 0, DEVICE):
        torch.openreg.reset(device)
    assert (x.fill_(1) + 1).tolist() == [2] * 3


@pytest.mark.parametrize("device", [-2, 64, "openreg:17"])
def test_reset_of_a_bad_index_is_refused_and_resets_nothing(device):
    lose()
    with pytest.raises(RuntimeError, match="is out of range: it must be from 0 to") as caught:
        torch.openreg.reset(device)
    assert not isinstance(caught.value, torch.AcceleratorError)
    with lost():
        torch.openreg.synchronize()


def test_random_numbers_go_on_after_a_reset():
    torch.openreg.manual_seed(7)
    expected = [torch.rand(4, device=DEVICE).cpu() for _ in range(3)]
    torch.openreg.manual_seed(7)
    assert torch.equal(torch.rand(4, device=DEVICE).cpu(), expected[0])
    state = torch.openreg.get_rng_state(0)
    lose()
    assert torch.equal(torch.openreg.get_rng_state(0), state)
    torch.openreg.reset(0)
    assert torch.equal(torch.openreg.get_rng_state(0), state)
    assert torch.equal(torch.rand(4, device=DEVICE).cpu(), expected[1])
    torch.openreg.set_rng_state(state, 0)
    assert torch.equal(torch.rand(4, device=DEVICE).cpu(), expected[1])


@pytest.mark.usefixtures("nothing_left")
def test_memory_statistics_stay_right_over_a_loss():
    before = torch.openreg.memory_allocated()
    ooms = torch.openreg.memory_stats()["num_ooms"]
    x = torch.ones(1 << 16, device=DEVICE)
    y = torch.ones(1 << 16, device=DEVICE)
    held = torch.openreg.memory_allocated()
    assert held - before == 2 << 18
    lose()
    with lost():
        torch.empty(1 << 24, device=DEVICE)
    with lost():
        x + 1
    assert torch.openreg.memory_allocated() == held
    del y
    assert torch.openreg.memory_allocated() == held - (1 << 18)
    torch.openreg.reset(0)
    assert torch.openreg.memory_allocated() == held - (1 << 18)
    assert torch.openreg.memory_reserved() >= torch.openreg.memory_allocated()
    del x
    assert torch.openreg.memory_allocated() == before
    assert torch.openreg.memory_stats()["num_ooms"] == ooms


def test_training_from_a_checkpoint_goes_on_after_a_loss():
    """From a checkpoint, as after a real loss: the numbers are those of an undisturbed run."""

    def train(lose_at):
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 1))
        data = torch.randn(32, 8)
        model.to(DEVICE)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        losses = []
        while len(losses) < 6:
            kept = {
                "model": {k: v.cpu() for k, v in model.state_dict().items()},
                "momentum": [s["momentum_buffer"].cpu() for s in optimizer.state.values()],
            }
            try:
                optimizer.zero_grad()
                x = data.to(DEVICE)
                loss = (model(x).squeeze(1) - x.sum(1)).square().mean()
                if len(losses) == lose_at:
                    lose_at = None
                    queue_loss()
                loss.backward()
                optimizer.step()
                losses.append(loss.item())
            except torch.AcceleratorError:
                torch.openreg.reset(0)
                model.load_state_dict(kept["model"])
                for state, value in zip(optimizer.state.values(), kept["momentum"], strict=True):
                    state["momentum_buffer"].copy_(value)
        assert lose_at is None
        return losses

    assert train(3) == train(None)


# ---- processes -------------------------------------------------------------------------------


def test_launch_blocking_raises_a_loss_at_the_call(run_ok):
    out = run_ok(
        """
    import device_loss, torch
    x = torch.ones(3, device="openreg")
    print(device_loss.queue_loss() == device_loss.CODE)
    try:
        x + 1
    except torch.AcceleratorError as error:
        print("openreg:0 is lost: lost failed" in str(error))
    torch.openreg.reset(0)
    print((x.fill_(1) + 1).tolist())
    """,
        env={"OPENREG_LAUNCH_BLOCKING": "1"},
    )
    assert out.splitlines() == ["True", "True", "[2.0, 2.0, 2.0]"]


def test_process_with_a_lost_device_ends_quietly(run_ok):
    assert (
        run_ok(
            """
    import device_loss, torch
    x = torch.ones(3, device="openreg", requires_grad=True)
    pinned = torch.ones(3).pin_memory()
    x.detach().copy_(pinned, non_blocking=True)
    stream, event = torch.openreg.Stream(0), torch.Event("openreg")
    gate = torch.openreg.testing.gate()
    gate.__enter__().wait(stream)
    with stream:
        y = (x * 2).sum()
        event.record()
    device_loss.lose()
    print("done")
    """
        )
        == "done\n"
    )


def test_compiled_functions_raise_a_loss_and_work_after_reset():
    compiled = torch.compile(lambda x: (x @ x).sin() * 2)
    compiled(torch.randn(8, 8, device=DEVICE))
    queue_loss()
    for function in (compiled, compiled, torch.compile(lambda x: (x * 3).cos())):
        with lost():
            function(torch.ones(8, 8, device=DEVICE))
            torch.openreg.synchronize()
    torch.openreg.reset(0)
    x = torch.randn(8, 8, device=DEVICE)
    torch.testing.assert_close(compiled(x), (x @ x).sin() * 2)
