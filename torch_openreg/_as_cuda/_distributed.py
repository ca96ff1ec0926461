"""Groups: "nccl" is the device's own backend, and keeps its name where programs read it."""

import datetime

import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from .._patches import replace, wrap
from ..openreg._utils import OWN_NAME
from ._names import refusing

_OURS = OWN_NAME


def install():
    backend = c10d.Backend
    # Under the one name that the device has now.
    backend.default_device_backend_map.pop(_OURS, None)
    backend.backend_capability[_OURS] = ["cuda"]
    replace("torch.distributed.is_nccl_available", lambda: True)
    where = "torch.distributed.distributed_c10d"
    if c10d.default_pg_nccl_timeout is None:
        replace(f"{where}.default_pg_nccl_timeout", datetime.timedelta(minutes=10))
    kind = type("ProcessGroupNCCL", (), {"__module__": c10d.__name__})
    replace(
        "torch.distributed.ProcessGroupNCCL", refusing("torch.distributed.ProcessGroupNCCL", kind)
    )
    dist.ProcessGroupNCCL.Options = refusing("torch.distributed.ProcessGroupNCCL.Options", kind)
    wrap(f"{where}.BackendConfig.__init__", _translate)


def _translate(init, config, backend):
    init(config, backend)
    # Done here because PyTorch 2.15 registers its NCCL at the first group.
    c10d.Backend.backend_type_map[c10d.Backend.NCCL] = c10d.ProcessGroup.BackendType.CUSTOM
    backends = config.device_backend_map
    for device, name in backends.items():
        if name == c10d.Backend.NCCL:
            backends[device] = _OURS
    if str(backend) == c10d.Backend.UNDEFINED and "cuda" in backends:
        backends["cpu"] = c10d.Backend.GLOO  # as where the device has its own name
