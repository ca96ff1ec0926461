"""Saving and loading, pickle and copy: tensors, modules, optimizers, generators."""

import copy
import io
import pickle

import pytest
import torch
import torch.nn.functional as F

DEVICE = "openreg:1"


def saved(obj, **options):
    file = io.BytesIO()
    torch.save(obj, file, **options)
    file.seek(0)
    return file


def loaded(obj, map_location=None, **options):
    return torch.load(saved(obj), map_location=map_location, **options)


# ---- Where it is loaded ----

LOCATIONS = {
    "none": (None, "openreg:1"),
    "cpu": ("cpu", "cpu"),
    "name": ("openreg", "openreg:0"),
    "string": ("openreg:0", "openreg:0"),
    "same": ("openreg:1", "openreg:1"),
    "device": (torch.device("openreg", 0), "openreg:0"),
    "cpu device": (torch.device("cpu"), "cpu"),
    "dict": ({"openreg:1": "openreg:0"}, "openreg:0"),
    "dict to cpu": ({"openreg:1": "cpu"}, "cpu"),
    "dict of others": ({"openreg:0": "cpu", "cuda:1": "cpu"}, "openreg:1"),
    "function to cpu": (lambda storage, location: storage, "cpu"),
    "function to a device": (lambda storage, location: storage.openreg(0), "openreg:0"),
    "function that leaves it": (lambda storage, location: None, "openreg:1"),
    "meta": ("meta", "meta"),
}


@pytest.mark.parametrize("weights_only", [True, False])
@pytest.mark.parametrize("where", LOCATIONS)
def test_load_puts_a_tensor_at_its_map_location(where, weights_only):
    map_location, expected = LOCATIONS[where]
    x = torch.arange(6.0, device=DEVICE)
    again = loaded(x, map_location, weights_only=weights_only)
    assert again.device == torch.device(expected)
    if expected != "meta":
        assert again.tolist() == [0, 1, 2, 3, 4, 5]


def test_load_calls_a_map_location_function_with_the_location():
    seen = []

    def map_location(storage, location):
        seen.append((storage.device.type, location))
        return storage

    loaded({"a": torch.ones(1, device=DEVICE), "b": torch.ones(1, device="openreg")}, map_location)
    assert sorted(seen) == [("cpu", "openreg:0"), ("cpu", "openreg:1")]


def test_load_moves_a_cpu_tensor_to_the_device():
    assert loaded(torch.arange(3.0), DEVICE).device == torch.device(DEVICE)
    with torch.openreg.device(1):
        assert loaded(torch.arange(3.0), "openreg").device == torch.device(DEVICE)
    with torch.device(DEVICE):
        assert loaded(torch.arange(3.0)).device == torch.device(DEVICE)


def test_load_to_a_device_that_does_not_exist_is_refused():
    x = torch.ones(2, device=DEVICE)
    for map_location in ("openreg:7", {"openreg:1": "openreg:7"}, torch.device("openreg:7")):
        with pytest.raises(
            RuntimeError, match=r"device 7 but .*device_count\(\) is 2.*map_location"
        ):
            loaded(x, map_location)
    assert loaded(x).sum().item() == 2


@pytest.mark.parametrize("count", [0, 1])
def test_checkpoint_of_a_missing_device_is_refused_without_map_location(run_ok, tmp_path, count):
    model = torch.nn.Linear(2, 2).to(DEVICE)
    path = tmp_path / "checkpoint.pt"
    torch.save(model.state_dict(), path)
    out = run_ok(
        f"""
        import torch
        try:
            torch.load({str(path)!r})
        except RuntimeError as error:
            print(error)
        for where in ("cpu", {{"openreg:1": "cpu"}}, lambda storage, location: storage):
            print(torch.load({str(path)!r}, map_location=where)["weight"].device)
        """,
        {"OPENREG_DEVICE_COUNT": str(count)},
    )
    told, *devices = out.splitlines()
    assert "map_location" in told
    if count:
        assert "device 1 but torch.openreg.device_count() is 1" in told
    else:
        assert "torch.openreg.is_available() is False" in told
    assert devices == ["cpu"] * 3


# ---- What is kept ----


@pytest.mark.parametrize("mmap", [False, True])
@pytest.mark.parametrize("where", [None, "cpu", "openreg:0"])
def test_saved_file_is_loaded_with_and_without_mmap(tmp_path, where, mmap):
    x = torch.randn(1 << 16, device=DEVICE)
    path = tmp_path / "x.pt"
    torch.save({"x": x, "y": x[10:20]}, path)
    again = torch.load(path, map_location=where, mmap=mmap)
    path.unlink()
    assert again["x"].device == torch.device(where or DEVICE)
    assert torch.equal(again["x"].cpu(), x.cpu())
    again["x"][10:20] = 5
    assert again["y"].tolist() == [5] * 10


def test_old_file_format_is_saved_and_loaded():
    x = torch.arange(3.0, device=DEVICE)
    file = saved(x, _use_new_zipfile_serialization=False)
    assert torch.load(file).device == x.device
    file.seek(0)
    assert torch.load(file, map_location="cpu").tolist() == [0, 1, 2]


def test_save_waits_for_queued_work():
    x = torch.zeros(1 << 10, device=DEVICE)
    side = torch.openreg.Stream(1)
    side.wait_stream(torch.openreg.current_stream(1))
    with side:
        torch.openreg._sleep(20_000_000)
        x.fill_(7)
        file, pickled, copied = saved(x), pickle.dumps(x), copy.deepcopy(x)
    for again in (torch.load(file), pickle.loads(pickled), copied):
        side.synchronize()
        assert again.min().item() == 7


@pytest.mark.parametrize("how", ["save", "pickle", "deepcopy"])
def test_saved_views_keep_strides_and_bits(how):
    again = {
        "save": loaded,
        "pickle": lambda obj: pickle.loads(pickle.dumps(obj)),
        "deepcopy": copy.deepcopy,
    }[how]
    base = torch.arange(12.0, device=DEVICE).view(3, 4)
    turned = again(base.t()[1:])
    assert turned.stride() == (1, 4) and turned.tolist() == base.t()[1:].tolist()
    if how != "pickle":
        whole, row = again([base, base[1]])
        assert whole.untyped_storage().data_ptr() == row.untyped_storage().data_ptr()
    z = torch.tensor([1 + 2j, 3 - 4j], device=DEVICE)
    assert again(z.conj()).tolist() == [1 - 2j, 3 + 4j]
    assert again(z.conj().imag).tolist() == [-2, 4]
    if how != "deepcopy":  # there PyTorch resolves the bits, on every device
        assert again(z.conj()).is_conj() and again(z.conj().imag).is_neg()
    dtypes = [torch.bool, torch.bfloat16, torch.int64]
    if how != "pickle":  # the plain pickle of these fails, on every device
        dtypes += [torch.float8_e4m3fn, torch.uint16]
    for dtype in dtypes:
        x = torch.arange(4, device=DEVICE).to(dtype)
        assert again(x).dtype == dtype and again(x).float().tolist() == x.float().tolist()
    assert again(torch.empty(0, 3, device=DEVICE)).shape == (0, 3)
    leaf = again(torch.ones(2, device=DEVICE, requires_grad=True))
    assert leaf.requires_grad and leaf.is_leaf and leaf.device == torch.device(DEVICE)
    parameter = again(torch.nn.Parameter(torch.ones(2, device=DEVICE)))
    assert isinstance(parameter, torch.nn.Parameter) and parameter.is_openreg


def test_saved_attributes_and_subclasses_are_kept():
    x = torch.ones(2, device=DEVICE)
    x.note = "kept"
    assert loaded(x, weights_only=False).note == "kept" and copy.deepcopy(x).note == "kept"
    buffer = torch.nn.Buffer(torch.ones(2, device=DEVICE))
    assert isinstance(loaded(buffer, weights_only=False), torch.nn.Buffer)


@pytest.mark.filterwarnings("ignore:TypedStorage is deprecated")
def test_saved_storages_keep_device_and_values():
    x = torch.arange(4, dtype=torch.uint8, device=DEVICE)
    for storage in (loaded(x.untyped_storage()), copy.deepcopy(x.untyped_storage())):
        assert storage.device == torch.device(DEVICE) and storage.tolist() == [0, 1, 2, 3]
    assert loaded(x.untyped_storage(), "cpu").tolist() == [0, 1, 2, 3]
    typed = torch.arange(3.0, device=DEVICE).storage()
    for storage in (loaded(typed), pickle.loads(pickle.dumps(typed))):
        assert storage.device == torch.device(DEVICE) and storage.tolist() == [0, 1, 2]


def test_deepcopy_copies_the_gradient():
    x = torch.ones(2, device=DEVICE, requires_grad=True)
    (x * 3).sum().backward()
    again = copy.deepcopy(x)
    assert again.grad.tolist() == [3, 3] and again.grad.data_ptr() != x.grad.data_ptr()
    with pytest.raises(RuntimeError, match="deepcopy"):
        copy.deepcopy(x * 2)


def test_deepcopy_shares_memory_that_was_shared():
    x = torch.arange(4.0, device=DEVICE)
    a, b = copy.deepcopy([x, x.view(2, 2)])
    a[0] = 9
    assert b[0, 0].item() == 9 and x[0].item() == 0


# ---- Programs ----


def net():
    return torch.nn.Sequential(
        torch.nn.Conv2d(1, 4, 3), torch.nn.BatchNorm2d(4), torch.nn.Dropout(0.3),
        torch.nn.Flatten(), torch.nn.Linear(4 * 36, 5),
    )  # fmt: skip


class Training:
    """A model with buffers, an optimizer with state, a schedule and a random stream."""

    def __init__(self, device, optimizer=torch.optim.AdamW):
        self.device = torch.device(device)
        self.model = net().to(device)
        self.optimizer = optimizer(self.model.parameters(), 0.01)
        self.schedule = torch.optim.lr_scheduler.StepLR(self.optimizer, 2)
        self.scaler = torch.amp.GradScaler("openreg", init_scale=4.0)
        self.noise = torch.Generator(device=device).manual_seed(5)

    def step(self):
        x = torch.randn(8, 1, 8, 8, device=self.device, generator=self.noise)
        y = torch.randint(0, 5, (8,), device=self.device)
        self.optimizer.zero_grad()
        loss = F.cross_entropy(self.model(x), y)
        self.scaler.scale(loss).backward()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.schedule.step()
        return loss.item()

    def state_dict(self):
        parts = {n: getattr(self, n) for n in ("model", "optimizer", "schedule", "scaler")}
        return {
            **{name: part.state_dict() for name, part in parts.items()},
            "noise": self.noise.get_state(),
            "random": torch.openreg.get_rng_state(self.device),
        }

    def load_state_dict(self, state):
        for name in ("model", "optimizer", "schedule", "scaler"):
            getattr(self, name).load_state_dict(state[name])
        self.noise.set_state(state["noise"].cpu())
        torch.openreg.set_rng_state(state["random"].cpu(), self.device)


RESUMES = {
    "in place": ("openreg:1", None),
    "device 0 by dict": ("openreg:0", {"openreg:1": "openreg:0"}),
    "device 0 by function": ("openreg:0", lambda storage, location: storage),
    "device 0 by device": ("openreg:0", torch.device("openreg:0")),
    "from the cpu": ("openreg:0", "cpu"),
}


@pytest.mark.parametrize("optimizer", [torch.optim.AdamW, torch.optim.SGD, torch.optim.RMSprop])
@pytest.mark.parametrize("resume", RESUMES)
def test_checkpoint_resumes_with_the_same_losses(tmp_path, resume, optimizer):
    """Dropout, batch norm's statistics, noise, the optimizer's moments: the losses are the same."""
    device, map_location = RESUMES[resume]
    torch.manual_seed(1)
    first = Training(DEVICE, optimizer)
    for _ in range(3):
        first.step()
    torch.save(first.state_dict(), tmp_path / "checkpoint.pt")
    expected = [first.step() for _ in range(4)]
    torch.manual_seed(2)
    again = Training(device, optimizer)
    again.load_state_dict(torch.load(tmp_path / "checkpoint.pt", map_location=map_location))
    assert [again.step() for _ in range(4)] == expected
    assert all(p.device == torch.device(device) for p in again.model.parameters())
    for a, b in zip(
        first.model.state_dict().values(), again.model.state_dict().values(), strict=True
    ):
        assert torch.equal(a.cpu(), b.cpu())


def test_whole_module_is_saved_and_pickled():
    model = net().to(DEVICE).eval()
    x = torch.randn(2, 1, 8, 8, device=DEVICE)
    for again in (loaded(model, weights_only=False), pickle.loads(pickle.dumps(model))):
        assert torch.equal(again(x), model(x))
        assert {t.device for t in again.state_dict().values()} == {torch.device(DEVICE)}
    there = loaded(model, "openreg:0", weights_only=False)
    assert {t.device for t in there.state_dict().values()} == {torch.device("openreg:0")}
    assert torch.equal(copy.deepcopy(model)(x), model(x))
    meta = torch.nn.Linear(2, 2, device="meta")
    meta.load_state_dict(torch.nn.Linear(2, 2).to(DEVICE).state_dict(), assign=True)
    assert meta.weight.device == torch.device(DEVICE)


def test_generators_are_pickled_and_copied_with_their_state():
    generator = torch.Generator(device=DEVICE).manual_seed(11)
    torch.rand(3, device=DEVICE, generator=generator)
    others = [
        pickle.loads(pickle.dumps(generator)),
        copy.deepcopy(generator),
        generator.clone_state(),
    ]
    expected = torch.rand(3, device=DEVICE, generator=generator).tolist()
    for other in others:
        assert other.device == torch.device(DEVICE) and other.initial_seed() == 11
        assert torch.rand(3, device=DEVICE, generator=other).tolist() == expected


def test_random_states_are_restored_from_a_file():
    torch.manual_seed(4)
    torch.randn(3, device=DEVICE)
    states = loaded(torch.openreg.get_rng_state_all())
    expected = [torch.rand(4, device=f"openreg:{i}").tolist() for i in range(2)]
    torch.manual_seed(9)
    torch.openreg.set_rng_state_all(states)
    assert [torch.rand(4, device=f"openreg:{i}").tolist() for i in range(2)] == expected
    with pytest.raises(TypeError, match="uint8 tensor on the CPU"):
        torch.openreg.set_rng_state(states[0].to(DEVICE), 1)
    with pytest.raises(ValueError, match="has 16 bytes, got 5056"):
        torch.openreg.set_rng_state(torch.get_rng_state(), 1)


def test_checkpoint_names_nothing_of_this_package():
    """A checkpoint of the device holds nothing that needs torch_openreg to be read."""
    import zipfile

    with zipfile.ZipFile(saved(net().to(DEVICE).state_dict())) as archive:
        name = next(n for n in archive.namelist() if n.endswith("data.pkl"))
        assert b"torch_openreg" not in archive.read(name)


def test_checkpoint_is_read_without_the_package(run_ok, tmp_path):
    torch.save(torch.arange(3.0, device=DEVICE), tmp_path / "x.pt")
    out = run_ok(
        f"""
        import torch
        print(torch.load({str(tmp_path / "x.pt")!r}, map_location="cpu").tolist())
        """,
        {"TORCH_DEVICE_BACKEND_AUTOLOAD": "0"},
    )
    assert out == "[0.0, 1.0, 2.0]\n"
