"""A runtime for pytorch-pfn-extras, registered as soon as both it and torch are imported::

    import pytorch_pfn_extras as ppe
    import torch

    ppe.to(model, "openreg:1")
    trainer = ppe.engine.create_trainer(model, optimizer, 20, device="openreg:1")

It needs the extra ``ppe``: ``pip install 'torch_openreg[ppe]'``.
"""

import torch
from torch.utils import _pytree

try:
    # Works in the middle of their import, too, before the package has it as an attribute.
    from pytorch_pfn_extras import runtime
except ImportError as error:
    raise ImportError(
        "torch_openreg.ppe needs pytorch-pfn-extras\n  help: pip install 'torch_openreg[ppe]'"
    ) from error

from . import openreg
from .openreg._utils import OWN_NAME, a_device

__all__ = ["OpenRegRuntime", "prefetch"]


class OpenRegRuntime(runtime.PyTorchRuntime):
    """What pytorch-pfn-extras does with modules and batches on an openreg device.

    Args:
        device_spec: the device; "openreg" is the current one at each use. A device of another type
            raises ValueError.
        options: of a dictionary, these:

            * ``prefetch`` (bool): batches are copied on a stream of their own while the current
              stream is still busy with earlier ones. The host does not wait for pinned batches; as
              with any asynchronous copy, they must not be written to afterwards.
            * ``autocast`` (bool or dict): for code blocks. A dictionary is passed to
              torch.autocast.
            * ``grad_scaler`` (torch.amp.GradScaler): for code blocks.
    """

    def __init__(self, device_spec, options):
        if torch.device(device_spec).type != OWN_NAME:
            raise ValueError(f"expected {a_device()}, got '{device_spec}'")
        self._prefetch = _option(options, "prefetch", False, bool)
        autocast = _option(options, "autocast", False, (bool, dict))
        if isinstance(autocast, bool):
            autocast = {"enabled": autocast}
        scaler = _option(options, "grad_scaler", None, (torch.amp.GradScaler, type(None)))
        # Without a device the base class would use CUDA, and no scaler.
        autocast = {"device_type": OWN_NAME, **autocast}
        super().__init__(device_spec, {"autocast": autocast})
        self.options = options
        self._grad_scaler = scaler
        self._stream = None

    @property
    def stream(self):
        """The stream on which prefetched batches are copied."""
        if self._stream is None:
            self._stream = openreg.Stream(self.device_spec)
        return self._stream

    def move_module(self, module):
        """Moves the module, whose parameters remain the same objects, so that optimizers stay
        valid. Calls initialize_module with its first batch."""
        module = module.to(self.device_spec)
        _forget_first_batch(module)
        module.register_forward_pre_hook(_first_batch, with_kwargs=True)
        return module

    def move_tensor(self, tensor):
        """The tensor on the device. Waits for the copy unless ``prefetch`` is set."""
        return tensor.to(self.device_spec, non_blocking=self._prefetch)

    def convert_batch(self, args):
        """The batch with its tensors on the device."""
        return self._hand_over(*self._copy(args)) if self._prefetch else super().convert_batch(args)

    def initialize_module(self, module, loader_or_batch, optimizer=None):
        """Moves what the module was given since it was moved itself, such as a new last layer.

        A trainer calls this with its loader; without one the module does so with its first batch.
        """
        _forget_first_batch(module)
        for part in module.modules():
            # Parts with a runtime stay where that one moved them, maybe on another device.
            if not hasattr(part, "_ppe_runtime"):
                part._apply(self.move_tensor, recurse=False)

    def train_epoch_end(self, module):
        """Waits for the device, so that a kernel's error surfaces in the epoch it belongs to."""
        openreg.synchronize(self.device_spec)

    def train_validation_end(self, module):
        """Waits for the device, as train_epoch_end does."""
        openreg.synchronize(self.device_spec)

    def map(self, func, iterable, out_keys=None, device="cpu"):
        """As in pytorch-pfn-extras; with ``prefetch`` the next batch is copied meanwhile."""
        if self._prefetch:
            batches = prefetch(iterable, self.device_spec)
        else:
            batches = map(self.convert_batch, iterable)
        return super().map(func, batches, out_keys, device)

    def _copy(self, batch):
        with self.stream:
            return super().convert_batch(batch), self.stream.record_event()

    def _hand_over(self, batch, copied):
        """Allows work queued on the current stream from now on to use the batch."""
        current = openreg.current_stream(self.stream.device)
        current.wait_event(copied)
        for part in _pytree.tree_leaves(batch):
            if isinstance(part, torch.Tensor) and part.device == current.device:
                # The memory belongs to the copy stream: a later copy must not reuse it before this
                # stream's work is done with it.
                part.record_stream(current)
        return batch


class prefetch:
    """A loader whose batches are on the device; the next one is copied while one is in use.

    The runtime's option ``prefetch`` does the same while the host runs ahead of the device. This
    class also does it for a loop that waits in every step. ::

        trainer.run(torch_openreg.ppe.prefetch(loader, "openreg:1"))

    Args:
        loader: batches in host memory, best pinned.
        device: the device.
    """

    def __init__(self, loader, device):
        self._loader = loader
        self._runtime = OpenRegRuntime(device, {"prefetch": True})

    @property
    def sampler(self):
        """The loader's sampler, if it has one; pytorch-pfn-extras sets its epoch."""
        return self._loader.sampler

    def __len__(self):
        return len(self._loader)

    def __iter__(self):
        following = None
        for batch in self._loader:
            upcoming, following = following, self._runtime._copy(batch)
            if upcoming is not None:
                yield self._runtime._hand_over(*upcoming)
        if following is not None:
            yield self._runtime._hand_over(*following)


def _option(options, name, default, types):
    value = options.get(name, default)
    if not isinstance(value, types):
        types = types if isinstance(types, tuple) else (types,)
        allowed = " or ".join(kind.__name__ for kind in types)
        raise TypeError(f"the runtime's option '{name}' is a {allowed}, got {value!r}")
    return value


def _first_batch(module, args, kwargs):
    """A forward pre-hook. It stores no runtime, so that a module is pickled and copied as ever; a
    copy has no runtime."""
    _forget_first_batch(module)
    runtime = getattr(module, "_ppe_runtime", None)
    if runtime is not None:
        runtime.initialize_module(module, kwargs if kwargs and not args else args)


def _forget_first_batch(module):
    for key, hook in list(module._forward_pre_hooks.items()):
        if hook is _first_batch:
            del module._forward_pre_hooks[key]
            module._forward_pre_hooks_with_kwargs.pop(key, None)


runtime.runtime_registry.register(OWN_NAME, OpenRegRuntime)
