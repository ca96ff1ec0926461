"""An accelerator for Lightning. Importing this module registers it::

    import lightning
    import torch_openreg.lightning

    fabric = lightning.Fabric(accelerator="openreg", devices=1)
    trainer = lightning.Trainer(accelerator="openreg", devices=[1])

It needs the extra ``lightning``: ``pip install 'torch_openreg[lightning]'``.
"""

import torch

try:
    import lightning
except ImportError as error:
    raise ImportError(
        "torch_openreg.lightning needs lightning\n  help: pip install 'torch_openreg[lightning]'"
    ) from error
if not lightning.__version__.startswith("2.6."):
    raise ImportError(
        f"torch_openreg.lightning needs lightning 2.6, found {lightning.__version__}\n"
        "  help: pip install 'torch_openreg[lightning]'"
    )

from lightning.fabric import accelerators as fabric_accelerators
from lightning.fabric import connector as fabric_connector
from lightning.fabric import strategies as fabric_strategies
from lightning.fabric.plugins.precision import MixedPrecision as FabricMixedPrecision
from lightning.pytorch import accelerators as trainer_accelerators
from lightning.pytorch import strategies as trainer_strategies
from lightning.pytorch.plugins.precision import MixedPrecision as TrainerMixedPrecision
from lightning.pytorch.trainer.connectors import accelerator_connector as trainer_connector

from . import openreg
from ._patches import wrapped
from .openreg._utils import OWN_NAME, a_device

__all__ = ["OpenRegAccelerator"]


class OpenRegAccelerator(trainer_accelerators.Accelerator):
    """The openreg devices, for Lightning's Fabric and Trainer.

    ``devices`` is a number of devices, -1 or "auto" for all of them, or their indices.
    """

    def setup_device(self, device):
        if device.type != OWN_NAME:
            raise ValueError(f"expected {a_device()}, got '{device}'")
        openreg.set_device(device)

    def teardown(self):
        """Leaves the device as it is: later work may use its cache."""

    def get_device_stats(self, device):
        return openreg.memory_stats(device)

    @staticmethod
    def parse_devices(devices):
        count = openreg.device_count()
        refusal = ValueError(
            f"devices={devices!r}: expected a number from 1 to {count}, or different indices from 0"
            f" to {count - 1}"
        )
        found = devices
        if isinstance(found, str):
            parts = [part.strip() for part in found.split(",") if part.strip()]
            if not parts or not all(part.lstrip("-").isdecimal() for part in parts):
                raise refusal
            found = [int(part) for part in parts] if "," in found else int(parts[0])
        if type(found) is int:
            found = range(count if found == -1 else found)
        if not isinstance(found, (list, tuple, range)):
            raise refusal
        known = all(type(index) is int and 0 <= index < count for index in found)
        if not found or not known or len(set(found)) < len(found):
            raise refusal
        return list(found)

    @staticmethod
    def get_parallel_devices(devices):
        return [torch.device(OWN_NAME, index) for index in devices]

    @staticmethod
    def auto_device_count():
        return openreg.device_count()

    @staticmethod
    def is_available():
        return openreg.is_available()

    @staticmethod
    def name():
        return OWN_NAME


def _no_device_ids():
    return None


def _complete(connector, single_device, mixed_precision, precision_name, precision_given):
    """Lightning asks the registered accelerator for its devices. For an accelerator that it does
    not support it then takes the CPU as the one device, CUDA's streams for DDP and CUDA's autocast.
    These two methods of its connectors decide all that."""

    def _init_strategy(original, self):
        original(self)
        if not isinstance(self.accelerator, OpenRegAccelerator):
            return
        if isinstance(self.strategy, single_device) and self.strategy.root_device.type == "cpu":
            self.strategy._root_device = self._parallel_devices[0]
        for name in ("_determine_ddp_device_ids", "determine_ddp_device_ids"):
            if hasattr(self.strategy, name):
                setattr(self.strategy, name, _no_device_ids)

    def _check_and_init_precision(original, self):
        name = getattr(self, precision_name)
        ours = isinstance(self.accelerator, OpenRegAccelerator)
        if ours and name in ("16-mixed", "bf16-mixed") and not getattr(self, precision_given):
            return mixed_precision(name, OWN_NAME)
        return original(self)

    for function in (_init_strategy, _check_and_init_precision):
        name = function.__name__
        setattr(connector, name, wrapped(getattr(connector, name), function))


for registry in (
    fabric_accelerators.ACCELERATOR_REGISTRY,
    trainer_accelerators.AcceleratorRegistry,
):
    registry.register(OWN_NAME, OpenRegAccelerator, "the devices of torch_openreg")
_complete(
    fabric_connector._Connector,
    fabric_strategies.SingleDeviceStrategy,
    FabricMixedPrecision,
    "_precision_input",
    "_precision_instance",
)
_complete(
    trainer_connector._AcceleratorConnector,
    trainer_strategies.SingleDeviceStrategy,
    TrainerMixedPrecision,
    "_precision_flag",
    "_precision_plugin_flag",
)
