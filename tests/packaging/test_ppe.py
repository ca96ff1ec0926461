"""The runtime for pytorch-pfn-extras: moves, batches, prefetch, trainer and evaluator."""

import collections
import copy
import io
import pickle

import pytest
import pytorch_pfn_extras as ppe
import torch
from torch import nn

import torch_openreg.ppe
from torch_openreg.ppe import OpenRegRuntime

DEVICE = torch.device("openreg:1")
SIZE = 1 << 20  # elements: a block of its own in the caching allocator


def runtime(**options):
    return OpenRegRuntime("openreg:1", options)


def pinned(value):
    return torch.full((SIZE,), float(value)).pin_memory()


class Net(nn.Module):
    """Reports what a Logic of theirs needs: a dictionary with a loss."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def forward(self, x, t):
        return {"loss": nn.functional.cross_entropy(self.layer(x), t)}


def make_net():
    torch.manual_seed(0)
    return Net()


def make_batches(count=6):
    generator = torch.Generator().manual_seed(1)
    return [
        {
            "x": torch.randn(8, 4, generator=generator),
            "t": torch.randint(3, (8,), generator=generator),
        }
        for _ in range(count)
    ]


def test_ppe_runtime_is_registered():
    for device in ("openreg", "openreg:1", DEVICE):
        found = ppe.runtime.runtime_registry.get_runtime_class_for_device_spec(device)
        assert found is OpenRegRuntime
    assert issubclass(OpenRegRuntime, ppe.runtime.BaseRuntime)


@pytest.mark.parametrize(
    "imports",
    [
        "import torch, pytorch_pfn_extras as ppe",
        *(
            pytest.param(imports, marks=pytest.mark.slow)
            for imports in (
                "import torch_openreg.ppe, pytorch_pfn_extras as ppe",
                "import pytorch_pfn_extras as ppe",
                "import pytorch_pfn_extras.runtime, pytorch_pfn_extras as ppe",
                "from pytorch_pfn_extras.runtime import runtime_registry; "
                "import pytorch_pfn_extras as ppe",
            )
        ),
    ],
)
def test_ppe_runtime_is_registered_by_importing_ppe(run_ok, imports):
    out = run_ok(f"""
        {imports}
        import sys
        registry = ppe.runtime.runtime_registry
        found = registry.get_runtime_class_for_device_spec("openreg:1")
        import torch, torch_openreg.ppe
        print(found is torch_openreg.ppe.OpenRegRuntime, torch.openreg.is_initialized())
        print(type(ppe.to(torch.nn.Linear(2, 2), "openreg:1")._ppe_runtime).__name__)
        waiting = [getattr(finder, "theirs", None) for finder in sys.meta_path]
        print([name for name in waiting if name and name.startswith("pytorch_pfn_extras")])
    """)
    assert out.split() == ["True", "False", "OpenRegRuntime", "[]"]


@pytest.mark.slow
def test_ppe_runtime_is_registered_where_the_device_comes_later(run_ok):
    out = run_ok(
        """
        import pytorch_pfn_extras as ppe
        import torch_openreg
        print(ppe.runtime.runtime_registry.get_runtime_class_for_device_spec("openreg").__name__)
        """,
        env={"TORCH_DEVICE_BACKEND_AUTOLOAD": "0"},
    )
    assert out == "OpenRegRuntime\n"


def test_ppe_is_not_imported_by_the_package(run_ok):
    assert (
        run_ok("""
        import sys
        import torch
        torch.ones(2, device="openreg")
        print([name for name in sys.modules if "pfn" in name or name == "torch_openreg.ppe"])
    """)
        == "[]\n"
    )


@pytest.mark.parametrize(
    ("module", "package", "name"),
    [("ppe", "pytorch_pfn_extras", "pytorch-pfn-extras"), ("lightning", "lightning", "lightning")],
)
def test_import_without_the_library_names_the_remedy(run_ok, module, package, name):
    out = run_ok(f"""
        import sys
        sys.modules["{package}"] = None
        import torch
        try:
            import torch_openreg.{module}
        except ImportError as error:
            print(error)
    """)
    assert out == (
        f"torch_openreg.{module} needs {name}\n  help: pip install 'torch_openreg[{module}]'\n"
    )


@pytest.mark.slow
def test_ppe_runtime_import_uses_no_device(run_ok):
    out = run_ok("""
        import torch, torch_openreg.ppe
        print(torch.openreg.is_initialized())
    """)
    assert out == "False\n"


@pytest.mark.parametrize("device", ["openreg:1", DEVICE], ids=repr)
def test_ppe_to_moves_and_tags_modules(device):
    net = make_net()
    parameters = list(net.parameters())
    moved = ppe.to(net, device)
    assert moved is net
    assert all(one is other for one, other in zip(moved.parameters(), parameters, strict=True))
    assert {p.device for p in moved.parameters()} == {DEVICE}
    assert {type(m._ppe_runtime) for m in moved.modules()} == {OpenRegRuntime}
    assert ppe.to(torch.ones(2), device).device == DEVICE


def test_ppe_to_without_an_index_uses_the_current_device():
    with torch.openreg.device(1):
        assert ppe.to(torch.ones(2), "openreg").device == DEVICE


def test_ppe_to_refuses_a_device_that_is_not_there():
    with pytest.raises(RuntimeError, match="9"):
        ppe.to(torch.ones(2), "openreg:9")
    with pytest.raises(ValueError, match="expected an openreg device, got 'cpu'"):
        OpenRegRuntime("cpu", {})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"prefetch": 2}, "'prefetch' is a bool, got 2"),
        ({"autocast": "on"}, "'autocast' is a bool or dict, got 'on'"),
        ({"grad_scaler": 1.0}, "'grad_scaler' is a GradScaler or NoneType, got 1.0"),
    ],
    ids=lambda value: "" if isinstance(value, str) else next(iter(value)),
)
def test_ppe_to_refuses_a_bad_option(options, message):
    with pytest.raises(TypeError, match=message):
        ppe.to(torch.ones(2), "openreg", options=options)


Pair = collections.namedtuple("Pair", "x name")


@pytest.mark.parametrize("prefetch", [False, True])
def test_convert_batch_moves_tensors_of_a_batch(prefetch):
    ours = runtime(prefetch=prefetch)
    x = torch.arange(3.0)

    def check(tensor):
        assert tensor.device == DEVICE
        assert tensor.cpu().equal(x)

    check(ours.convert_batch(x))
    got = ours.convert_batch({"x": x, "name": "a"})
    assert got.keys() == {"x", "name"} and got["name"] == "a"
    check(got["x"])
    got = ours.convert_batch((x, 5))
    assert got[1] == 5
    check(got[0])
    got = ours.convert_batch(Pair(x, "a"))
    assert type(got) is Pair and got.name == "a"
    check(got.x)
    assert ours.convert_batch("text") == "text"
    there = x.to(DEVICE)
    assert ours.convert_batch(there) is there


class Recorder(OpenRegRuntime):
    def __init__(self, device_spec, options):
        super().__init__(device_spec, options)
        self.calls = []

    def __getattribute__(self, name):
        if name.startswith(("train_", "eval_")):
            self.calls.append(name)
        return super().__getattribute__(name)

    def initialize_module(self, module, loader_or_batch, optimizer=None):
        self.calls.append("initialize_module")
        self.initialized_with = loader_or_batch, optimizer
        super().initialize_module(module, loader_or_batch, optimizer)


def test_first_batch_initializes_the_module_once():
    net = ppe.to(make_net(), DEVICE, runtime_class=Recorder)
    ours = net._ppe_runtime
    assert ours.calls == []
    batch = ours.convert_batch(make_batches(1)[0])
    net(batch["x"], batch["t"])
    assert ours.calls == ["initialize_module"]
    (x, t), optimizer = ours.initialized_with
    assert x is batch["x"] and t is batch["t"] and optimizer is None
    net(batch["x"], batch["t"])
    assert ours.calls == ["initialize_module"]
    assert not net._forward_pre_hooks and not net._forward_pre_hooks_with_kwargs


def test_first_batch_by_keywords_initializes_the_module():
    net = ppe.to(make_net(), DEVICE, runtime_class=Recorder)
    batch = net._ppe_runtime.convert_batch(make_batches(1)[0])
    net(**batch)
    assert net._ppe_runtime.initialized_with[0].keys() == {"x", "t"}


def test_module_moved_twice_has_the_last_runtime():
    net = ppe.to(make_net(), "openreg:0", runtime_class=Recorder)
    first = net._ppe_runtime
    ppe.to(net, DEVICE, runtime_class=Recorder)
    net(**net._ppe_runtime.convert_batch(make_batches(1)[0]))
    assert first.calls == [] and net._ppe_runtime.calls == ["initialize_module"]
    assert net.layer.weight.device == DEVICE


def test_initialize_module_moves_what_was_added_and_nothing_else():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    ppe.to(model, "openreg:1")
    ppe.to(model[1], "openreg:0")
    model.append(nn.BatchNorm1d(4))
    model._ppe_runtime.initialize_module(model, None)
    assert {str(t.device) for t in model[2].state_dict().values()} == {"openreg:1"}
    assert str(model[1].weight.device) == "openreg:0"


def test_state_dict_and_gradients_are_those_of_the_cpu():
    expected, net = make_net(), ppe.to(make_net(), DEVICE)
    batch = make_batches(1)[0]
    expected(**batch)["loss"].backward()
    net(**net._ppe_runtime.convert_batch(batch))["loss"].backward()
    assert list(net.state_dict()) == list(expected.state_dict())
    for one, other in zip(net.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(one.grad.cpu(), other.grad)
    there = {name: value.cpu() for name, value in net.state_dict().items()}
    make_net().load_state_dict(there)
    torch.testing.assert_close(there, dict(expected.state_dict()))


@pytest.mark.parametrize("used", [False, True], ids=["unused", "used"])
def test_module_of_a_runtime_is_pickled_and_copied(used):
    net = ppe.to(make_net(), DEVICE)
    batch = runtime().convert_batch(make_batches(1)[0])
    if used:
        net(**batch)
    file = io.BytesIO()
    torch.save(net, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    for other in (pickle.loads(pickle.dumps(net)), copy.deepcopy(net), loaded):
        assert not hasattr(other, "_ppe_runtime")
        assert other(**batch)["loss"].item() == net(**batch)["loss"].item()
        assert not other._forward_pre_hooks


# ---- Prefetch ----


def test_prefetch_does_not_wait_for_the_current_stream():
    ours = runtime(prefetch=True)
    ours.convert_batch(pinned(0))
    source = pinned(1)
    stream = torch.openreg.current_stream(1)
    with torch.openreg.testing.gate(1) as gate:
        gate.wait(stream)
        there = ours.convert_batch(source)
        with ours.stream:
            assert there.eq(1).all().item()  # the copy is done
        assert not stream.query()
        result = there + 1
    assert result.cpu().eq(2).all()


def test_prefetched_batches_are_waited_for(runs_ahead):
    ours = runtime(prefetch=True)
    source = pinned(1)
    stream = torch.openreg.default_stream(1)

    def use():
        with stream:
            result = ours.convert_batch({"x": source})["x"] + 1
        torch.openreg.Stream(1).synchronize()
        assert not stream.query()
        return result

    with ours.stream:
        result = runs_ahead(use)
    assert result.cpu().eq(2).all()


def test_prefetch_does_not_overwrite_a_batch_in_use():
    ours = runtime(prefetch=True)
    sources = [pinned(value) for value in range(4)]
    results = []
    stream = torch.openreg.current_stream(1)
    torch.openreg.empty_cache()
    with torch.openreg.testing.gate(1) as gate:
        gate.wait(stream)
        for source in sources:
            # Dropped by the host at once; the addition that reads it is held by the gate.
            results.append(ours.convert_batch([source])[0] + 1)
        ours.stream.synchronize()
        assert not stream.query()
    for value, result in enumerate(results):
        assert result.cpu().eq(value + 1).all()


def test_prefetch_keeps_the_current_device_and_stream():
    side = torch.openreg.Stream(0)
    with side:
        runtime(prefetch=True).convert_batch(pinned(1))
        assert torch.openreg.current_device() == 0
        assert torch.openreg.current_stream(0) == side
    assert torch.openreg.current_stream(1) == torch.openreg.default_stream(1)


def test_prefetching_loader_is_one_ahead():
    asked = []

    def host():
        for value in range(3):
            asked.append(value)
            yield pinned(value), value

    class Loader:
        __len__ = staticmethod(lambda: 3)
        __iter__ = staticmethod(host)

    loader = torch_openreg.ppe.prefetch(Loader(), "openreg:1")
    assert len(loader) == 3 and not hasattr(loader, "sampler")
    for _ in range(2):
        got = []
        for x, value in loader:
            assert x.device == DEVICE
            assert asked == list(range(min(value + 2, 3)))
            got.append((value, x.mean().item()))
        assert got == [(0, 0.0), (1, 1.0), (2, 2.0)]
        asked.clear()
    assert list(torch_openreg.ppe.prefetch([], "openreg:1")) == []


def test_prefetching_loader_shows_its_sampler():
    loader = torch.utils.data.DataLoader(range(4))
    assert torch_openreg.ppe.prefetch(loader, DEVICE).sampler is loader.sampler


# ---- Their engine ----


def train(device, out, net=None, epochs=3, options=None, loader=None, **others):
    net = ppe.to(net or make_net(), device, options=options)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    evaluator = ppe.engine.create_evaluator(
        net, device=device, runtime_options=options, options={"eval_report_keys": ["loss"]}
    )
    trainer = ppe.engine.create_trainer(
        net,
        optimizer,
        epochs,
        device=device,
        evaluator=evaluator,
        runtime_options=options,
        options={"train_report_keys": ["loss"], **others},
        out_dir=str(out),
    )
    observed = []

    @ppe.training.make_extension(trigger=(1, "epoch"), priority=-1)
    def observe(manager):
        losses = {k: v for k, v in manager.observation.items() if k.endswith("loss")}
        observed.append({name: torch.as_tensor(loss).cpu() for name, loss in losses.items()})

    trainer.extend(observe)
    trainer.run(loader or make_batches(), make_batches(2))
    return net, observed


@pytest.mark.parametrize("prefetch", [False, True])
def test_trainer_and_evaluator_give_what_they_give_on_the_cpu(tmp_path, prefetch):
    expected, expected_observed = train("cpu", tmp_path)
    net, observed = train("openreg:1", tmp_path, options={"prefetch": prefetch})
    assert len(observed) == 3 and observed[0].keys() == {"train/loss", "val/loss"}
    torch.testing.assert_close(observed, expected_observed)
    assert {p.device for p in net.parameters()} == {DEVICE}
    for one, other in zip(net.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(one.cpu(), other)


def test_trainer_takes_a_prefetching_loader(tmp_path):
    expected = train("cpu", tmp_path)[1]
    loader = torch_openreg.ppe.prefetch(make_batches(), "openreg:1")
    torch.testing.assert_close(train("openreg:1", tmp_path, loader=loader)[1], expected)


def test_trainer_calls_the_runtimes_callbacks_in_order(tmp_path, monkeypatch):
    monkeypatch.setitem(ppe.runtime.runtime_registry._runtimes, "openreg", Recorder)
    net = train("openreg:1", tmp_path, epochs=1, loader=make_batches(2))[0]
    steps = ["train_pre_step", "train_post_step"]
    evaluated = ["eval_pre_step", "eval_post_step"] * 2
    assert net._ppe_runtime.calls == [
        *["initialize_module"] * 2,  # for the trainer and for the evaluator
        "train_epoch_begin",
        *steps * 2,
        "train_validation_begin",
        *evaluated,
        "train_validation_end",
        "train_epoch_end",
        "train_cleanup",
    ]


@pytest.mark.parametrize("callback", ["train_epoch_end", "train_validation_end"])
def test_epoch_end_waits_for_the_device(callback):
    x = torch.ones(SIZE, device=DEVICE)
    event = torch.openreg.Event()
    with torch.openreg.device(1):
        torch.openreg._sleep(50_000_000)
        y = x + 1
        event.record()
    getattr(runtime(), callback)(None)
    assert event.query()
    assert y.sum().item() == 2 * SIZE


def test_code_block_logic_trains_with_autocast_and_scaler(tmp_path):
    dtypes = []

    class Watched(Net):
        def forward(self, x, t):
            out = self.layer(x)
            dtypes.append(out.dtype)
            return {"loss": nn.functional.cross_entropy(out, t)}

    scaler = torch.amp.GradScaler("openreg", init_scale=2.0**4)
    options = {"autocast": {"dtype": torch.float16}, "grad_scaler": scaler}
    net = ppe.to(Watched(), DEVICE, options=options)
    before = net.layer.weight.detach().clone()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    trainer = ppe.engine.create_trainer(
        net,
        optimizer,
        1,
        device=DEVICE,
        logic=ppe.handler.CodeBlockLogic(),
        out_dir=str(tmp_path),
    )
    trainer.run(make_batches(3))
    assert dtypes == [torch.float16] * 3
    assert scaler.state_dict()["_growth_tracker"] == 3 and not net.layer.weight.equal(before)


def test_default_logic_trains_with_autocast(tmp_path):
    # Their Logic has an option of its own, which must name the device.
    autocast = {"device_type": "openreg", "dtype": torch.bfloat16}
    observed = train("openreg:1", tmp_path, autocast=autocast)[1]
    assert observed[-1]["train/loss"] < observed[0]["train/loss"]


@pytest.mark.parametrize("prefetch", [False, True])
def test_ppe_map_gives_outputs_on_the_host(prefetch):
    net = ppe.to(make_net(), DEVICE, options={"prefetch": prefetch})
    expected = [make_net()(**batch)["loss"].item() for batch in make_batches(3)]
    got = list(ppe.map(net, make_batches(3), out_keys={"loss"}))
    assert {str(out["loss"].device) for out in got} == {"cpu"}
    assert [out["loss"].item() for out in got] == pytest.approx(expected)


def test_profile_names_the_steps_of_a_trainer(tmp_path):
    with torch.profiler.profile() as profile:
        with ppe.profiler.record("of mine", device="openreg:1", trace=True):
            torch.ones(2, device=DEVICE)
    assert "of mine" in {event.key for event in profile.key_averages()}
