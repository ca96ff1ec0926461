"""``torch.openreg.set_sync_debug_mode``: calls that make the host wait say so, or refuse."""

import warnings

import pytest
import torch

openreg = torch.openreg
LARGE = 1 << 17  # floats: more than is copied at the call


@pytest.fixture(autouse=True)
def default_mode():
    yield
    openreg.set_sync_debug_mode("default")


def names(calls):
    return [str(w.message).partition("operation: ")[2] for w in calls]


def warned(function, *arguments):
    """What `function` warns of in mode "warn"."""
    openreg.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as calls:
            warnings.simplefilter("always")
            function(*arguments)
    finally:
        openreg.set_sync_debug_mode("default")
    assert all(issubclass(w.category, UserWarning) for w in calls)
    assert all("called a synchronizing openreg operation" in str(w.message) for w in calls)
    return names(calls)


def test_sync_debug_mode_is_set_by_word_or_number():
    assert openreg.get_sync_debug_mode() == 0
    for word, number in (("warn", 1), ("error", 2), ("default", 0)):
        openreg.set_sync_debug_mode(word)
        assert openreg.get_sync_debug_mode() == number
        openreg.set_sync_debug_mode(0)
        openreg.set_sync_debug_mode(number)
        assert openreg.get_sync_debug_mode() == number
    with pytest.raises(RuntimeError, match=r"'loud', expected one of `default`, `warn`, `error`"):
        openreg.set_sync_debug_mode("loud")
    with pytest.raises(RuntimeError, match=r"debug_mode 3, expected one of 0, 1, 2"):
        openreg.set_sync_debug_mode(3)
    with pytest.raises(RuntimeError, match=r"debug_mode -1, expected"):
        openreg.set_sync_debug_mode(-1)
    for mode in (1.5, None, b"warn"):
        with pytest.raises(TypeError, match=f"'warn' or 'error', not {mode!r}"):
            openreg.set_sync_debug_mode(mode)
    assert openreg.get_sync_debug_mode() == 0


def sparse():
    return torch.eye(3, device="openreg").to_sparse()


def pinned(n=4):
    return torch.empty(n, pin_memory=True)


def diagonal(x):
    """Sparse, and made without looking at it."""
    where = torch.arange(4, device=x.device).expand(2, 4)
    options = {"is_coalesced": True, "check_invariants": False}
    return torch.sparse_coo_tensor(where, x, (4, 4), **options)


def event_synchronize(x):
    event = openreg.Event()
    event.record()
    event.synchronize()


# What waits, with the name that is given.
WAITING = {
    "item": (lambda x: x[0].item(), "_local_scalar_dense (item)"),
    "float": (lambda x: float(x[0]), "item"),
    "bool": (lambda x: bool(x[0] > 0), "item"),
    "nonzero": (lambda x: x.nonzero(), "aten::nonzero"),
    "unique": (lambda x: torch.unique(x), "aten::_unique2"),
    "mask": (lambda x: x[x > 0], "aten::index"),
    "masked_select": (lambda x: x.masked_select(x > 0), "aten::masked_select"),
    "histc": (lambda x: x.histc(4), "item"),
    "equal": (lambda x: torch.equal(x, x + 1), "aten::equal"),
    "from pageable": (lambda x: torch.ones(4).to(x.device), "aten::copy_ (from pageable host"),
    "cast from pageable": (
        lambda x: torch.ones(4).to(x.device, torch.half),
        "aten::copy_ (from pageable",
    ),
    "tensor": (lambda x: torch.tensor([1], device=x.device), "aten::copy_ (from pageable host"),
    "cpu": (lambda x: x.cpu(), "aten::copy_ (from openreg:0 to pageable host memory)"),
    "tolist": (lambda x: x.tolist(), "aten::copy_ (from openreg:0 to pageable"),
    "non_blocking to pageable": (
        lambda x: torch.empty(4).copy_(x, non_blocking=True),
        "to pageable",
    ),
    "from pageable to strides": (
        lambda x: x[::2].copy_(torch.tensor([0.0, 2.0])),
        "aten::copy_ (from pageable host",
    ),
    "strided to pageable": (lambda x: x[::2].cpu(), "to pageable host memory"),
    "cast to pageable": (lambda x: torch.empty(4, dtype=torch.half).copy_(x), "to pageable host"),
    "to pinned": (lambda x: pinned().copy_(x), "aten::copy_ (from openreg:0 to pinned"),
    "from pinned": (lambda x: x.copy_(pinned()), "aten::copy_ (from pinned host memory to"),
    "large from pageable": (lambda x: torch.ones(LARGE).to(x.device), "from pageable host memory"),
    "large non_blocking": (lambda x: torch.ones(LARGE).to(x.device, non_blocking=True), "pageable"),
    "check_errors": (
        lambda x: torch.linalg.inv_ex(x[1:].view(3, 1, 1), check_errors=True),
        "aten::linalg_inv_ex",
    ),
    "sparse": (lambda x: torch.sparse.sum(sparse()), "aten::"),
    "synchronize": (lambda x: openreg.synchronize(), "torch.openreg.synchronize"),
    "accelerator": (lambda x: torch.accelerator.synchronize(), "torch.accelerator.synchronize"),
    "stream": (lambda x: openreg.current_stream().synchronize(), "Stream.synchronize"),
    "event": (event_synchronize, "Event.synchronize"),
    "empty_cache": (lambda x: openreg.empty_cache(), "torch.openreg.empty_cache"),
}


@pytest.mark.parametrize("call", WAITING)
def test_call_that_waits_warns_or_is_refused(call):
    function, name = WAITING[call]
    x = torch.arange(4.0, device="openreg")
    function(x)
    assert any(name in text for text in warned(function, x))
    with openreg.testing.gate() as gate:  # in mode "error" nothing waits, or this would hang
        gate.wait()
        openreg.set_sync_debug_mode("error")
        with pytest.raises(RuntimeError, match="called a synchronizing openreg operation") as error:
            function(x)
        openreg.set_sync_debug_mode("default")
    assert "aten::" in str(error.value) or name in str(error.value)
    function(x)
    assert x.tolist() == [0, 1, 2, 3]


def optimizer_step(x):
    weight = torch.ones(4, 4, device="openreg", requires_grad=True)
    optimizer = torch.optim.Adam([weight])
    (weight @ x).sum().backward()
    optimizer.step()


NOT_WAITING = {
    "pointwise": lambda x: (x * 2).sum(),
    "histc with bounds": lambda x: x.histc(4, 0, 1),
    "a shape never seen": lambda x: torch.nn.functional.conv1d(
        x.view(1, 1, 4), x[:3].view(1, 1, 3)
    ),
    "index": lambda x: x[torch.arange(2, device="openreg")],
    "small from pageable": lambda x: torch.ones(4).to(x.device, non_blocking=True),
    "small strided": lambda x: torch.ones(4, 4)[:, 0].to(x.device, non_blocking=True),
    "sparse @ dense": lambda x: torch.ops.aten.mm(diagonal(x), x.view(4, 1)),
    "from pinned": lambda x: x.copy_(pinned(), non_blocking=True),
    "to pinned": lambda x: pinned().copy_(x, non_blocking=True),
    "between devices": lambda x: x.to("openreg:1"),
    "query": lambda x: openreg.current_stream().query(),
    "training": optimizer_step,
    "random": lambda x: torch.randn_like(x),
}


@pytest.mark.parametrize("call", NOT_WAITING)
def test_call_that_does_not_wait_gives_no_warning(call):
    x = torch.arange(4.0, device="openreg")
    assert warned(NOT_WAITING[call], x) == []


def test_sync_warning_comes_once_a_call_at_its_line():
    x = torch.arange(4.0, device="openreg")
    openreg.set_sync_debug_mode("warn")
    with pytest.warns(UserWarning) as calls:
        x.nonzero()
    assert names(calls) == ["aten::nonzero"] and calls[0].filename == __file__


def test_sync_warning_as_an_exception_changes_nothing():
    x = torch.arange(4.0, device="openreg")
    openreg.set_sync_debug_mode("warn")
    for call in (
        x.nonzero,
        x.cpu,
        x[0].item,
        openreg.synchronize,
        openreg.current_stream().synchronize,
    ):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            with openreg.testing.gate() as gate:
                gate.wait()
                with pytest.raises(UserWarning, match="synchronizing openreg operation"):
                    call()


def test_refused_copy_leaves_its_destination_as_it_was():
    x, there = torch.ones(4, device="openreg"), torch.zeros(4)
    openreg.set_sync_debug_mode("error")
    with pytest.raises(RuntimeError, match="to pageable host memory"):
        there.copy_(x)
    assert there.tolist() == [0, 0, 0, 0]


def test_sync_debug_mode_holds_in_backward_threads():
    class Look(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            return grad * grad.sum().item()

    x = torch.ones(2, device="openreg", requires_grad=True)
    y = Look.apply(x).sum()
    openreg.set_sync_debug_mode("error")
    with pytest.raises(RuntimeError, match="item"):
        y.backward()
    openreg.set_sync_debug_mode("default")
    Look.apply(x).sum().backward()
    assert x.grad.tolist() == [2, 2]


def test_allocation_that_had_to_wait_warns(run_ok):
    out = run_ok(
        """
        import warnings
        import torch

        warnings.simplefilter("always")
        side = torch.openreg.Stream()

        def fill():  # half of the device, freed while another stream uses it
            x = torch.empty(40 << 20, dtype=torch.uint8, device="openreg")
            with side:
                torch.openreg._sleep(200_000_000)
                x.record_stream(side)

        fill()
        torch.openreg.set_sync_debug_mode("warn")
        with warnings.catch_warnings(record=True) as calls:
            y = torch.empty(40 << 20, dtype=torch.uint8, device="openreg")
        print([str(w.message) for w in calls])
        del y
        fill()
        torch.openreg.set_sync_debug_mode("error")
        try:
            torch.empty(40 << 20, dtype=torch.uint8, device="openreg")
        except RuntimeError as error:
            print(error)
        print(torch.openreg.memory_allocated())
        y = torch.empty(40 << 20, dtype=torch.uint8, device="openreg")
        """,
        {"OPENREG_DEVICE_MEMORY": "64M"},
    )
    first, second, third = out.splitlines()
    assert "operation: an allocation of 40.00 MiB on openreg:0 that had to wait" in first
    assert "operation: an allocation of 40.00 MiB on openreg:0 that had to wait" in second
    assert third == "0"


def test_device_without_map_names_the_waiting_operator(run_ok, plugins):
    library = next(p for p in sorted(plugins.glob("*.so")) if "map" in p.name)
    for plugin in sorted(plugins.glob("*.so")):
        out = run_ok(
            """
            import torch

            x = torch.arange(4.0, device="openreg")
            torch.openreg.set_sync_debug_mode("error")
            try:
                x.nonzero()
            except RuntimeError as error:
                print(str(error).splitlines()[0])
            """,
            {"OPENREG_PLUGIN": str(plugin)},
        )
        assert out.strip().endswith("operation: aten::nonzero"), (plugin, library)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested")
def test_refused_operator_draws_no_random_numbers():
    x = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], device="openreg").normal_()
    before = torch.openreg.get_rng_state()
    torch.openreg.set_sync_debug_mode("error")
    try:
        with pytest.raises(RuntimeError, match="synchroniz"):
            x.normal_()
    finally:
        torch.openreg.set_sync_debug_mode("default")
    assert torch.equal(torch.openreg.get_rng_state(), before)


def test_sync_debug_mode_does_not_apply_to_tools():
    openreg.set_sync_debug_mode("error")
    found = openreg.testing.explore(lambda: torch.ones(3, device="openreg") + 1, 2)
    assert found.ok and found.results[0].value.tolist() == [2.0] * 3
    with pytest.raises(RuntimeError, match=r"openreg\.synchronize"):
        openreg.synchronize()
