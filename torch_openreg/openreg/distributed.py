"""The backend of torch.distributed for openreg tensors: PyTorch's own Gloo over device memory."""

import threading

import torch
from torch.distributed import distributed_c10d as c10d

from .. import _C
from .._patches import wrap
from ._utils import OWN_NAME, is_ours, type_name

thread = threading.local()  # of testing.run_ranks: `is_rank` and `timeout`


def register():
    """Makes it the device's backend. Starts nothing."""
    c10d.Backend.register_backend(OWN_NAME, _create, extended_api=True, devices=[OWN_NAME])
    # Gloo, which carries the collectives, writes each into the flight recorder (PyTorch 2.15).
    getattr(c10d, "_FR_SELF_RECORDING_BACKENDS", set()).add(OWN_NAME)
    # What PyTorch copies before it splits a group without other options.
    _C.ProcessGroupOpenReg.options = property(lambda backend: _Options(backend._gloo_options))
    _C.ProcessGroupOpenReg.supports_splitting = property(_supports_splitting)
    where = "torch.distributed.distributed_c10d"
    wrap(f"{where}.BackendConfig.__init__", _serve_both)
    wrap(f"{where}._get_pg_default_device", _default_to(lambda: torch.device(OWN_NAME)))
    wrap(f"{where}._get_object_coll_device", _default_to(lambda: OWN_NAME))
    if torch.distributed.rpc.is_available():
        # The options' constructor calls both: set_device_map() one, set_devices() the other.
        for name in ("_to_device_map", "_to_device_list"):
            wrap(f"torch.distributed.rpc.options.{name}", _refuse_devices)


def _create(options, gloo_options):
    """Called by init_process_group() and new_group(): the backend of one group. Where the ranks are
    threads of this process, memory takes Gloo's place."""
    arguments = (options.store, options.group_rank, options.group_size)
    if gloo_options is not None and not isinstance(gloo_options, c10d.ProcessGroupGloo.Options):
        raise TypeError(
            "expected pg_options of type ProcessGroupGloo.Options or None for the backend "
            f"'{OWN_NAME}', got {type(gloo_options).__name__}"
        )
    if getattr(thread, "is_rank", False):
        kept = gloo_options or c10d.ProcessGroupGloo._Options()
        kept._timeout = min(options.timeout, thread.timeout)  # new_group's default is 30 minutes
        gloo = _C._make_thread_transport(*arguments, kept)
    elif gloo_options is None:
        gloo = c10d.ProcessGroupGloo(*arguments, timeout=options.timeout)
    else:
        gloo = c10d.ProcessGroupGloo(*arguments, gloo_options)
    if isinstance(gloo, c10d.ProcessGroupGloo):
        kept = gloo.options
    # As PyTorch does for its own: a split of the group needs them. The default group's are empty.
    ranks = options.global_ranks_in_group or list(range(options.group_size))
    kept.global_ranks_in_group = ranks
    kept.group_name = options.group_id
    return _C._make_process_group(gloo, options.store, ranks)


class _Options(c10d.ProcessGroupGloo._Options):
    """Gloo's options, in a form that PyTorch can copy, as it does when it splits a group."""

    def __init__(self, options):
        super().__init__()
        for name in ("_timeout", "_threads", "_devices", "global_ranks_in_group", "group_name"):
            setattr(self, name, getattr(options, name))

    def __deepcopy__(self, memo):
        return _Options(self)


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


def _serve_both(init, config, backend):
    """Without a named backend, or with ours without a device, adds Gloo for CPU tensors; with
    "gloo" adds ours for the device's. Each has its own connections: neither waits for the other's
    calls, so their relative order may differ between the ranks. PyTorch's fake backend, which
    communicates nothing, serves this device like others."""
    init(config, backend)
    named = str(backend).lower()
    device, backends = type_name(), config.device_backend_map
    if named == c10d.Backend.GLOO and torch._C._get_accelerator().type == device:
        config.device_backend_map = {"cpu": c10d.Backend.GLOO, device: OWN_NAME}
    elif named in (c10d.Backend.UNDEFINED, OWN_NAME) and OWN_NAME in backends.values():
        backends["cpu"] = c10d.Backend.GLOO
    elif named == c10d.Backend.FAKE:
        backends[device] = c10d.Backend.FAKE


def _default_to(device):
    """For a group with our name, as "nccl" has cuda: PyTorch takes the CPU for each that has it. If
    programs take it for the device's, they send on one group what others receive on the other."""

    def default(function, group=None):
        found = group or c10d._get_default_group()
        if isinstance(found, c10d.ProcessGroup):
            backend, _ = c10d._world.pg_map.get(found, ("", None))
            if backend == OWN_NAME:
                return device()
        return function(group)

    return default


def refuse_on_rank_thread(what):
    if getattr(thread, "is_rank", False):
        raise NotImplementedError(
            f"{what} is not supported in a rank of torch.openreg.testing.run_ranks\n"
            "  help: it needs a process for each rank: use torch.multiprocessing.spawn or torchrun"
        )


def _refuse_devices(convert, given):
    """For RPC. TensorPipe has a channel for CUDA's memory alone, and a map for another device ends
    the process in a thread of the agent."""
    given = given if isinstance(given, dict) else list(given)
    devices = [*given, *given.values()] if isinstance(given, dict) else given
    for device in map(torch.device, devices):
        if is_ours(device):
            raise NotImplementedError(
                f"a device map of TensorPipe with {device} is not supported\n"
                "  help: RPC carries tensors of the CPU alone: send tensor.cpu()"
            )
    return convert(given)
