"""The backend of torch.distributed for openreg tensors: PyTorch's own Gloo over device memory."""

import functools

from torch.distributed import distributed_c10d as c10d

from .. import _C

_NAME = "openreg"


def register():
    """Makes it the backend of the device. Starts nothing."""
    c10d.Backend.register_backend(_NAME, _create, extended_api=True, devices=[_NAME])
    _C.ProcessGroupOpenReg.options = property(_options_of)
    _C.ProcessGroupOpenReg.supports_splitting = property(_supports_splitting)
    _serve_cpu_too()


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
    # As PyTorch does with its own: a split of the group needs them. The default group's are empty.
    ranks = options.global_ranks_in_group or list(range(options.group_size))
    gloo.options.global_ranks_in_group = ranks
    gloo.options.group_name = options.group_id
    return _C._make_process_group(gloo, options.store, ranks)


class _Options(c10d.ProcessGroupGloo._Options):
    """Gloo's, but PyTorch can copy them, as it does when it splits a group."""

    def __init__(self, options):
        super().__init__()
        for name in ("_timeout", "_threads", "_devices", "global_ranks_in_group", "group_name"):
            setattr(self, name, getattr(options, name))

    def __deepcopy__(self, memo):
        return _Options(self)


def _options_of(backend):
    """What PyTorch copies before it splits a group, if it is given no other options."""
    return _Options(backend._gloo_options)


def _supports_splitting(backend):
    """What PyTorch asks before each split."""
    if c10d.is_initialized():
        _number_ranks_of_cpu()
    return True


def _number_ranks_of_cpu():
    """PyTorch splits the group's Gloo for CPU tensors too, and that one reads the ranks in its own
    options. Those of the default group are empty: it would read behind their end, and crash."""
    group = c10d._get_default_group()
    for device in group._device_types:
        gloo = group._get_backend(device)
        if isinstance(gloo, c10d.ProcessGroupGloo) and not gloo.options.global_ranks_in_group:
            gloo.options.global_ranks_in_group = list(range(group.size()))


def _serve_cpu_too():
    """No backend named, or ours without a device, means Gloo for CPU tensors beside it."""
    init = c10d.BackendConfig.__init__

    @functools.wraps(init)
    def init_with_cpu(self, backend):
        init(self, backend)
        named = str(backend).lower()
        if named in (c10d.Backend.UNDEFINED, _NAME) and _NAME in self.device_backend_map:
            self.device_backend_map["cpu"] = c10d.Backend.GLOO

    c10d.BackendConfig.__init__ = init_with_cpu
