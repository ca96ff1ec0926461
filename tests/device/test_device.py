import threading

import pytest
import torch


def test_device_count_is_two_by_default():
    assert torch.openreg.device_count() == 2
    assert torch.accelerator.device_count() == 2
    assert torch.openreg.is_available()
    assert torch.accelerator.current_accelerator() == torch.device("openreg")


@pytest.mark.parametrize("count", [0, 1, 4, 8, 64])
def test_device_count_is_configured(run_ok, count):
    out = run_ok(
        "import torch; print(torch.openreg.device_count(), torch.accelerator.device_count())",
        {"OPENREG_DEVICE_COUNT": str(count)},
    )
    assert out.split() == [str(count)] * 2


@pytest.mark.parametrize("count", ["-3", "abc", "100000", "65", "", "2x"])
def test_device_count_that_is_bad_warns_once_and_gives_no_device(run, count):
    done = run(
        """
        import torch
        print(torch.openreg.device_count(), torch.openreg.is_available())
        print(torch.accelerator.is_available())
        x = torch.ones(3, requires_grad=True)
        (x * 2).sum().backward()
        print(x.grad.tolist())
        try:
            torch.empty(3, device="openreg")
        except RuntimeError as error:
            print(error)
        """,
        {"OPENREG_DEVICE_COUNT": count},
    )
    lines = done.out.splitlines()
    assert done.code == 0
    assert lines[:3] == ["0 False", "False", "[2.0, 2.0, 2.0]"]
    assert "no openreg device" in done.out
    assert len(done.err.splitlines()) == 1
    assert "OPENREG_DEVICE_COUNT" in done.err and count in done.err and "64" in done.err


def test_device_index_context_places_and_restores():
    with torch.accelerator.device_index(1):
        assert torch.accelerator.current_device_index() == 1
        tensor = torch.randn(100, device="openreg:1")
        assert torch.empty(1, device="openreg").device.index == 1
        result = tensor * 2
    assert torch.accelerator.current_device_index() == 0
    assert result.device == torch.device("openreg", 1)
    assert torch.equal(result.cpu(), tensor.cpu() * 2)


@pytest.mark.parametrize(
    "context",
    [
        lambda: torch.accelerator.device_index(1),
        lambda: torch.openreg.device(1),
        lambda: torch.openreg.device("openreg:1"),
        lambda: torch.openreg.device_of(torch.empty(0, device="openreg:1")),
        lambda: torch.Stream(device="openreg:1"),
        lambda: torch.openreg.stream(torch.openreg.Stream(1)),
    ],
)
def test_device_contexts_restore_the_device(context):
    with context():
        assert torch.openreg.current_device() == 1
    assert torch.openreg.current_device() == 0
    with pytest.raises(KeyError):
        with context():
            raise KeyError
    assert torch.openreg.current_device() == 0


@pytest.mark.parametrize(
    "choose",
    [
        "torch.accelerator.device_index(1).__enter__()",
        "torch.openreg._exchange_device(1)",
        *(
            pytest.param(choose, marks=pytest.mark.slow)
            for choose in (
                "torch.openreg.set_device(1)",
                "torch.accelerator.set_device_index(1)",
                "torch.openreg.device(1).__enter__()",
            )
        ),
    ],
)
def test_choosing_a_device_initializes_it(run_ok, choose):
    # A fake tensor is on the current device if that has been used, and on the first one if not.
    out = run_ok(
        f"""
        import threads, torch
        from torch._subclasses.fake_tensor import FakeTensorMode
        before = len(threads.names())
        {choose}
        print(torch.openreg.is_initialized(), len(threads.names()) - before)
        with FakeTensorMode():
            print(torch.empty(2, device="openreg").device)
        """
    )
    assert out.split() == ["True", "0", "openreg:1"]


def test_choosing_no_device_initializes_none(run_ok):
    out = run_ok(
        """
        import torch
        torch.openreg.set_device(-1), torch.accelerator.set_device_index(-1)
        assert torch.openreg._exchange_device(-1) == torch.openreg._maybe_exchange_device(-1) == -1
        with torch.openreg.device(None), torch.openreg.device(-1):
            with torch.openreg.device_of(torch.ones(2)):
                print(torch.openreg.is_initialized())
        """
    )
    assert out == "False\n"


@pytest.mark.parametrize("name", ["openreg", "cuda"])
def test_device_that_was_used_before_another_is_selected_is_told(run_ok, name):
    run_ok(
        f"""
        import os, sys, warnings
        import torch
        if {name!r} == "cuda":
            import torch_openreg
            torch_openreg.as_cuda()
        variable = "TORCH_CUDA" if {name!r} == "cuda" else "OPENREG"
        os.environ[variable + "_CHECK_STRAY_CONTEXT"] = "warn"
        def line():
            return sys._getframe(1).f_lineno
        x, first = torch.ones(2, device={name!r}), line()
        chosen = []
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always")
            torch.openreg.set_device(0)  # which is in use, and its own
            torch.openreg.set_device(1); chosen.append(line())
            torch.accelerator.set_device_index(1); chosen.append(line())
        assert [w.lineno for w in found] == chosen, found
        assert all(f"{name} device(s) [0] already" in str(w.message) for w in found)
        assert all(f":{{first}})" in str(w.message) for w in found), found[0].message
        os.environ[variable + "_CHECK_STRAY_CONTEXT"] = "error"
        for choose in torch.openreg.set_device, torch.accelerator.set_device_index:
            try:
                choose(1)
            except RuntimeError as error:
                assert "help: select the rank's device before" in str(error)
            else:
                raise AssertionError
        assert torch.openreg.current_device() == 1
        """
    )


def test_device_context_stands_for_its_device():
    context = torch.openreg.device(1)
    assert torch.openreg.get_device_name(context) == "/openreg:1"
    assert torch.openreg.Stream(context).device.index == 1
    assert torch.openreg.current_stream(context).device.index == 1
    torch.openreg.synchronize(context)
    with torch.openreg.device(context):
        assert torch.openreg.current_device() == 1
    torch.openreg.set_device(context)
    assert torch.openreg.current_device() == 1
    torch.openreg.set_device(torch.openreg.device(-1))
    assert torch.openreg.current_device() == 1
    assert torch.openreg.get_device_name(torch.openreg.device(-1)) == "/openreg:1"


def test_device_indices_are_found_as_cudas_helper_finds_them():
    from torch.openreg._utils import _get_device_index

    assert [_get_device_index(d) for d in (1, -1, "openreg:1", torch.device("openreg", 0))] == [
        *(1, -1, 1, 0)
    ]
    assert _get_device_index(torch.openreg.device(1)) == 1
    assert _get_device_index("cpu", allow_cpu=True) == -1
    with torch.openreg.device(1):
        assert _get_device_index(None, optional=True) == 1
        assert _get_device_index("openreg", optional=True) == 1
    for wrong, arguments, text in (
        ("cpu", {}, "Expected an openreg device, but got: cpu"),
        ("meta", {"allow_cpu": True}, "Expected an openreg or cpu device, but got: meta"),
        ("openreg", {}, r"specified index or an integer, but got: device\(type='openreg'\)"),
        (None, {}, "specified index or an integer, but got: None"),
    ):
        with pytest.raises(ValueError, match=text):
            _get_device_index(wrong, **arguments)


def test_device_contexts_of_no_device_change_nothing():
    torch.openreg.set_device(1)
    for context in (
        torch.openreg.device(None),
        torch.openreg.device(-1),
        torch.openreg.device_of(torch.ones(1)),
        torch.openreg.stream(None),
        torch.accelerator.device_index(None),
    ):
        with context:
            assert torch.openreg.current_device() == 1
        assert torch.openreg.current_device() == 1


def test_call_that_fails_on_another_device_restores_the_current_one():
    for call in (
        lambda: torch.empty(2**50, device="openreg:1"),
        lambda: torch.openreg.Event(device=2),
        lambda: torch.Stream(device="openreg:5"),
        lambda: torch.openreg.mem_get_info(9),
    ):
        with pytest.raises(RuntimeError):
            call()
        assert torch.openreg.current_device() == 0


def test_current_device_belongs_to_the_thread():
    seen = []
    torch.openreg.set_device(1)
    thread = threading.Thread(target=lambda: seen.append(torch.openreg.current_device()))
    thread.start()
    thread.join()
    assert seen == [0]
    assert torch.openreg.current_device() == 1


def test_negative_device_is_the_documented_no_op():
    torch.openreg.set_device(1)
    torch.accelerator.set_device_index(-1)
    torch.openreg.set_device(-1)
    assert torch.openreg.current_device() == 1


def test_device_properties_of_one_device_are_equal():
    first, again, other = map(torch.openreg.get_device_properties, (0, 0, 1))
    assert first == again and hash(first) == hash(again)
    assert first != other and first != 0


def test_device_properties_have_name_memory_and_lanes():
    for index in range(2):
        properties = torch.openreg.get_device_properties(index)
        assert properties.name == f"/openreg:{index}" == torch.openreg.get_device_name(index)
        assert properties.index == index
        assert properties.total_memory > 0
        assert 1 <= properties.lanes <= 8
        assert f"'/openreg:{index}'" in repr(properties)
        free, total = torch.openreg.mem_get_info(f"openreg:{index}")
        assert 0 <= free <= total == properties.total_memory


def test_device_capability_lists_dtypes():
    for capability in (
        torch.accelerator.get_device_capability(1),
        torch.openreg.get_device_capability("openreg:1"),
    ):
        assert {torch.float32, torch.bfloat16, torch.complex128} <= capability["supported_dtypes"]
    assert torch.openreg.is_bf16_supported()


def test_can_device_access_peer_follows_the_setting(run_ok):
    assert torch.openreg.can_device_access_peer(0, 1)
    out = run_ok(
        "import torch; print(torch.openreg.can_device_access_peer(0, 1))",
        {"OPENREG_PEER_ACCESS": "0"},
    )
    assert out.strip() == "False"


def test_reset_keeps_streams_events_and_tensors_valid(eventually):
    stream = torch.openreg.Stream()
    tensor = torch.ones(4, device="openreg")
    gate = torch.openreg.testing.gate()
    gate.wait(stream)
    event = torch.openreg.Event()
    event.record(stream)
    assert not event.query()
    torch.openreg.reset()
    assert event.query() and stream.query()
    gate.open()
    tensor.fill_(3)
    assert tensor.tolist() == [3] * 4


def test_storage_resize_keeps_the_contents():
    tensor = torch.arange(4.0, device="openreg:1")
    side = torch.openreg.Stream(1)
    side.wait_stream(torch.openreg.current_stream(1))
    with torch.openreg.stream(side):
        tensor.untyped_storage().resize_(32)
        torch.openreg.synchronize()
    grown = tensor.as_strided((8,), (1,)) if tensor.untyped_storage().nbytes() == 32 else None
    assert grown is not None and grown[:4].tolist() == [0, 1, 2, 3]
    tensor.untyped_storage().resize_(0)
    assert tensor.untyped_storage().nbytes() == 0


def test_random_states_are_on_the_host():
    state = torch.openreg.get_rng_state(1)
    assert state.device.type == "cpu" and state.dtype == torch.uint8 and state.numel() == 16
    first = torch.randn(5, device="openreg:1")
    torch.openreg.set_rng_state(state, 1)
    assert torch.equal(torch.randn(5, device="openreg:1").cpu(), first.cpu())
    assert not torch.equal(torch.randn(5, device="openreg:1").cpu(), first.cpu())


def test_manual_seed_seeds_every_device():
    torch.manual_seed(7)
    assert [g.initial_seed() for g in torch.openreg.default_generators] == [7, 7]
    first = [torch.randn(5, device=f"openreg:{i}").cpu() for i in range(2)]
    torch.openreg.manual_seed_all(7)
    again = [torch.randn(5, device=f"openreg:{i}").cpu() for i in range(2)]
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    torch.openreg.manual_seed(-1)
    assert torch.openreg.initial_seed() == 2**64 - 1
    states = torch.openreg.get_rng_state_all()
    torch.openreg.seed_all()
    torch.openreg.set_rng_state_all(states)
    assert torch.openreg.initial_seed() == 2**64 - 1


def test_generator_states_repeat_their_numbers():
    generator = torch.Generator(device="openreg:1")
    assert generator.device == torch.device("openreg", 1)
    generator.manual_seed(3)
    state = generator.get_state()
    first = torch.rand(6, device="openreg:1", generator=generator).cpu()
    copy = generator.clone_state() if hasattr(generator, "clone_state") else None
    second = torch.rand(6, device="openreg:1", generator=generator).cpu()
    assert not torch.equal(first, second)
    if copy is not None:
        assert torch.equal(torch.rand(6, device="openreg:1", generator=copy).cpu(), second)
    generator.set_state(state)
    assert torch.equal(torch.rand(6, device="openreg:1", generator=generator).cpu(), first)


def test_default_generators_name_a_bad_index():
    assert len(torch.openreg.default_generators) == 2
    with pytest.raises(IndexError, match=r"index 2.*2 devices"):
        torch.openreg.default_generators[2]
