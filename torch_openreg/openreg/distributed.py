"""The backend of torch.distributed for openreg tensors: PyTorch's own Gloo over device memory."""

import torch
from torch.distributed import distributed_c10d as c10d

from .. import _C
from .._patches import wrap
from ._utils import is_ours

_NAME = "openreg"


def register():
    """Makes it the device's backend. Starts nothing."""
    c10d.Backend.register_backend(_NAME, _create, extended_api=True, devices=[_NAME])
    _C.ProcessGroupOpenReg.options = property(_options_of)
    _C.ProcessGroupOpenReg.supports_splitting = property(_supports_splitting)
    where = "torch.distributed.distributed_c10d"
    wrap(f"{where}.BackendConfig.__init__", _serve_both)
    wrap(f"{where}._get_pg_default_device", _default_to(lambda: torch.device(_NAME)))
    wrap(f"{where}._get_object_coll_device", _default_to(lambda: _NAME))
    if torch.distributed.rpc.is_available():
        # The options' constructor calls both: set_device_map() one, set_devices() the other.
        for name in ("_to_device_map", "_to_device_list"):
            wrap(f"torch.distributed.rpc.options.{name}", _refusing_devices)


def _create(options, gloo_options):
    """Called by init_process_group() and new_group(): the backend of one group."""
    arguments = (options.store, options.group_rank, options.group_size)
    if gloo_options is None:
        gloo = c10d.ProcessGroupGloo(*arguments, timeout=options.timeout)
    elif isinstance(gloo_options, c10d.ProcessGroupGloo.Options):
        gloo = c10d.ProcessGroupGloo(*arguments, gloo_options)
    else:
        raise TypeError(
            "expected pg_options of type ProcessGroupGloo.Options or None for the backend "
            f"'{_NAME}', got {type(gloo_options).__name__}"
        )
    # As PyTorch does for its own: a split of the group needs them. The default group's are empty.
    ranks = options.global_ranks_in_group or list(range(options.group_size))
    gloo.options.global_ranks_in_group = ranks
    gloo.options.group_name = options.group_id
    return _C._make_process_group(gloo, options.store, ranks)


class _Options(c10d.ProcessGroupGloo._Options):
    """Gloo's options, in a form that PyTorch can copy, as it does when it splits a group."""

    def __init__(self, options):
        super().__init__()
        for name in ("_timeout", "_threads", "_devices", "global_ranks_in_group", "group_name"):
            setattr(self, name, getattr(options, name))

    def __deepcopy__(self, memo):
        return _Options(self)


def _options_of(backend):
    """What PyTorch copies before it splits a group without other options."""
    return _Options(backend._gloo_options)


def _supports_splitting(backend):
    """PyTorch calls it before each split."""
    if c10d.is_initialized():
        _number_ranks_of_cpu()
    return True


def _number_ranks_of_cpu():
    """PyTorch splits the group's Gloo for CPU tensors too, which reads the ranks in its own
    options. The default group's are empty: it would read beyond their end, and crash."""
    group = c10d._get_default_group()
    for device in group._device_types:
        gloo = group._get_backend(device)
        if isinstance(gloo, c10d.ProcessGroupGloo) and not gloo.options.global_ranks_in_group:
            gloo.options.global_ranks_in_group = list(range(group.size()))


def _serve_both(init):
    """Without a named backend, or with ours without a device, adds Gloo for CPU tensors; with
    "gloo" adds ours for the device's. Each has its own connections: neither waits for the other's
    calls, so their relative order may differ between the ranks."""

    def init_with_both(self, backend):
        init(self, backend)
        named = str(backend).lower()
        device = torch._C._get_privateuse1_backend_name()
        if named == c10d.Backend.GLOO and torch._C._get_accelerator().type == device:
            self.device_backend_map = {"cpu": c10d.Backend.GLOO, device: _NAME}
        elif named in (c10d.Backend.UNDEFINED, _NAME) and _NAME in self.device_backend_map.values():
            self.device_backend_map["cpu"] = c10d.Backend.GLOO

    return init_with_both


def _default_to(device):
    """For a group with our name, as "nccl" has cuda: PyTorch takes the CPU for each that has it. If
    programs take it for the device's, they send on one group what others receive on the other."""

    def replacing(function):
        def default(group=None):
            found = group or c10d._get_default_group()
            if isinstance(found, c10d.ProcessGroup):
                backend, _ = c10d._world.pg_map.get(found, ("", None))
                if backend == _NAME:
                    return device()
            return function(group)

        return default

    return replacing


def _refusing_devices(convert):
    """For RPC. TensorPipe has a channel for CUDA's memory alone, and a map for another device ends
    the process in a thread of the agent."""

    def convert_or_refuse(given):
        given = given if isinstance(given, dict) else list(given)
        devices = [*given, *given.values()] if isinstance(given, dict) else given
        for device in map(torch.device, devices):
            if is_ours(device):
                raise NotImplementedError(
                    f"a device map of TensorPipe with {device} is not supported: RPC carries "
                    "tensors of the CPU alone: send tensor.cpu()"
                )
        return convert(given)

    return convert_or_refuse
