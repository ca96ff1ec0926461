"""Lightning's Fabric and Trainer on the registered accelerator: the losses of the CPU."""

import os
import textwrap

import lightning
import pytest
import torch
from lightning.fabric.plugins.precision import MixedPrecision
from lightning.fabric.strategies import SingleDeviceStrategy
from torch import nn

from torch_openreg.lightning import OpenRegAccelerator

pytestmark = pytest.mark.filterwarnings("ignore")  # Lightning's advice about workers and loggers


def make_model():
    lightning.seed_everything(3, verbose=False)
    return nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 3))


def data():
    generator = torch.Generator().manual_seed(0)
    x, y = torch.randn(32, 8, generator=generator), torch.randint(3, (32,), generator=generator)
    return torch.utils.data.TensorDataset(x, y)


def train(fabric):
    """The mean loss of each epoch, the device and the dtype of the outputs."""
    model = make_model()
    losses, dtypes = [], set()
    model[0].register_forward_hook(lambda module, inputs, output: dtypes.add(output.dtype))
    model, optimizer = fabric.setup(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
    loader = torch.utils.data.DataLoader(data(), batch_size=8 // fabric.world_size)
    loader = fabric.setup_dataloaders(loader)
    for _ in range(3):
        total = torch.zeros((), device=fabric.device)
        for x, y in loader:
            assert x.device == fabric.device
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(x), y)
            fabric.backward(loss)
            fabric.clip_gradients(model, optimizer, max_norm=1.0)
            optimizer.step()
            total += fabric.all_reduce(loss.detach(), reduce_op="mean")
        losses.append(total.item())
    fabric.barrier()
    devices = {str(p.device) for p in model.parameters()}
    return losses, devices, [str(dtype) for dtype in dtypes]


@pytest.fixture(scope="module")
def expected():
    return train(lightning.Fabric(accelerator="cpu", devices=1))[0]


@pytest.mark.parametrize(
    ("devices", "where"), [(1, "openreg:0"), ([1], "openreg:1"), ("1,", "openreg:1")], ids=repr
)
def test_fabric_trains_with_the_cpus_losses(devices, where, expected):
    fabric = lightning.Fabric(accelerator="openreg", devices=devices)
    fabric.launch()
    assert fabric.device == torch.device(where)
    assert torch.openreg.current_device() == fabric.device.index
    losses, devices, _ = train(fabric)
    assert devices == {where}
    assert losses == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize(
    ("precision", "dtype"),
    [
        ("bf16-mixed", torch.bfloat16),
        ("16-mixed", torch.float16),
        ("bf16-true", torch.bfloat16),
        ("64-true", torch.float64),
    ],
)
def test_fabric_precision_decides_the_dtype(precision, dtype, expected):
    fabric = lightning.Fabric(accelerator="openreg", devices=[1], precision=precision)
    losses, devices, dtypes = train(fabric)
    assert devices == {"openreg:1"} and dtypes == [str(dtype)]
    assert losses == pytest.approx(expected, rel=1e-2)


def test_fabric_scaler_is_the_devices():
    fabric = lightning.Fabric(accelerator="openreg", devices=1, precision="16-mixed")
    precision = fabric._connector.precision
    assert precision.scaler.is_enabled() and precision.scaler._device == "openreg"


def test_fabric_takes_a_given_precision_and_strategy():
    own = MixedPrecision("bf16-mixed", device="openreg")
    fabric = lightning.Fabric(accelerator="openreg", devices=1, plugins=own)
    assert fabric._connector.precision is own
    fabric = lightning.Fabric(
        accelerator=OpenRegAccelerator(), strategy=SingleDeviceStrategy("openreg:1")
    )
    assert fabric.device == torch.device("openreg:1")


def test_fabric_on_another_accelerator_is_unchanged():
    fabric = lightning.Fabric(accelerator="cpu", devices=1, precision="bf16-mixed")
    assert fabric.device == torch.device("cpu")
    assert fabric._connector.precision.device == "cpu"


def test_lightning_of_another_version_is_refused(run_ok):
    out = run_ok("""
        import lightning
        lightning.__version__ = "3.0.0"
        try:
            import torch_openreg.lightning
        except ImportError as error:
            print(error)
    """)
    assert "needs lightning 2.6, found 3.0.0\n  help: pip install 'torch_openreg[lightning]'" in out


def test_accelerator_registry_lists_openreg():
    from lightning.fabric.accelerators import ACCELERATOR_REGISTRY
    from lightning.pytorch.accelerators import AcceleratorRegistry

    for registry in (ACCELERATOR_REGISTRY, AcceleratorRegistry):
        assert type(registry.get("openreg")) is OpenRegAccelerator
    assert OpenRegAccelerator.auto_device_count() == torch.openreg.device_count()


@pytest.mark.parametrize("devices", [3, [5], "x", "0,0", [True], "-3", 1.5, None], ids=repr)
def test_fabric_refuses_devices_that_are_not_there(devices):
    with pytest.raises(ValueError, match="expected a number from 1 to 2, or different indices"):
        lightning.Fabric(accelerator="openreg", devices=devices)


def test_accelerator_refuses_another_device():
    with pytest.raises(ValueError, match="expected an openreg device, got 'cpu'"):
        OpenRegAccelerator().setup_device(torch.device("cpu"))


def test_fabric_checkpoint_resumes_with_the_same_losses(tmp_path):
    fabric = lightning.Fabric(accelerator="openreg", devices=[1])
    model = make_model()
    model, optimizer = fabric.setup(model, torch.optim.AdamW(model.parameters(), lr=1e-2))

    def step():
        x, y = (part.to(fabric.device) for part in data()[:8])
        loss = nn.functional.cross_entropy(model(x), y)
        fabric.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    step()
    state = {"model": model, "optimizer": optimizer, "steps": 1}
    fabric.save(tmp_path / "state", state)
    following = [step() for _ in range(3)]
    state["steps"] = 0
    fabric.load(tmp_path / "state", state)
    assert state["steps"] == 1
    assert {t.device for t in model.state_dict().values()} == {torch.device("openreg:1")}
    assert [step() for _ in range(3)] == following


def train_spawned(fabric):
    losses, devices, dtypes = train(fabric)
    everywhere = fabric.all_gather(torch.tensor(fabric.device.index, device=fabric.device))
    return losses, devices, dtypes, everywhere.tolist()


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_fabric_trains_with_ddp_over_two_devices(precision, expected):
    fabric = lightning.Fabric(
        accelerator="openreg", devices=2, strategy="ddp_spawn", precision=precision
    )
    losses, devices, dtypes, everywhere = fabric.launch(train_spawned)
    assert devices == {"openreg:0"} and everywhere == [0, 1]
    assert dtypes == [str(torch.bfloat16 if precision == "bf16-mixed" else torch.float32)]
    assert losses == pytest.approx(expected, rel=1e-2 if precision == "bf16-mixed" else 1e-4)


class Module(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.model = make_model()
        self.losses = []

    def training_step(self, batch, index):
        x, y = batch
        loss = nn.functional.cross_entropy(self.model(x), y)
        self.log("loss", loss, on_epoch=True)
        self.losses.append(loss.detach())
        return loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def fit(tmp_path, **options):
    trainer = lightning.Trainer(
        max_epochs=2,
        default_root_dir=tmp_path,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **options,
    )
    module = Module()
    trainer.fit(module, torch.utils.data.DataLoader(data(), batch_size=8))
    return trainer, module


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_lightning_trainer_has_the_cpus_losses(precision, tmp_path):
    _, on_cpu = fit(tmp_path / "cpu", accelerator="cpu", devices=1)
    trainer, module = fit(tmp_path, accelerator="openreg", devices=[1], precision=precision)
    tolerance = 1e-2 if precision == "bf16-mixed" else 1e-4
    assert {loss.device for loss in module.losses} == {torch.device("openreg:1")}
    expected = [loss.item() for loss in on_cpu.losses]
    assert [loss.item() for loss in module.losses] == pytest.approx(expected, rel=tolerance)
    loaded = Module.load_from_checkpoint(trainer.checkpoint_callback.best_model_path)
    for one, other in zip(loaded.parameters(), module.parameters(), strict=True):
        assert one.cpu().equal(other.cpu())


SCRIPT = """
    import sys
    sys.path.insert(0, {folder!r})
    import lightning
    from test_lightning import train

    fabric = lightning.Fabric(accelerator="openreg", devices=2)
    fabric.launch()
    losses, devices, _ = train(fabric)
    print("result", fabric.global_rank, *devices, *losses, flush=True)
"""


def test_lightning_script_starts_itself_once_for_each_device(run, tmp_path, expected):
    path = tmp_path / "script.py"
    path.write_text(textwrap.dedent(SCRIPT.format(folder=os.path.dirname(__file__))))
    done = run("", arguments=[str(path)])
    assert done.code == 0, done.err
    found = sorted(line.split() for line in done.out.splitlines() if line.startswith("result"))
    assert [line[1:3] for line in found] == [["0", "openreg:0"], ["1", "openreg:1"]]
    for line in found:
        assert [float(loss) for loss in line[3:]] == pytest.approx(expected, rel=1e-4)
