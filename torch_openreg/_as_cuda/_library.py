"""Kernels that a program registers for CUDA's dispatch keys, from Python."""

import functools
import weakref

import torch
from torch.library import Library

KEYS = {
    f"{kind}CUDA": f"{kind}PrivateUse1"
    for kind in ("", "Autograd", "Autocast", "Sparse", "SparseCsr", "Quantized", "NestedTensor")
}
# PyTorch's own that are a card's: they want its compiler, its libraries or its links to others.
OF_A_CARD = ("torch._native", "torch.nn.attention", "torch.distributed._symmetric_memory")

_taken = {}  # by namespace, operator and key: the library that has it for the device


def _is_for_the_device(name, key, fn):
    """Of PyTorch's own, only what is missing."""
    module = getattr(fn, "__module__", None) or ""
    if not module.startswith("torch."):
        return True
    if module.startswith(OF_A_CARD):
        return False
    return not torch._C._dispatch_has_kernel_for_dispatch_key(name, key)


def _give_up(place, taken=None):
    """Whatever serves there, or `taken` if it still does."""
    if taken is None or _taken.get(place) is taken:
        former = _taken.pop(place, None)
        if former is not None:
            former._destroy()


def install():
    impl, destroy = Library.impl, Library._destroy

    def take(library, place, op_name, fn, with_keyset):
        _give_up(place)
        taken = _taken[place] = Library(library.ns, "IMPL")
        impl(taken, op_name, fn, place[2], with_keyset=with_keyset)
        end = weakref.finalize(library, _give_up, place, taken)
        library.__dict__.setdefault("_ends_for_the_device", []).append(end)

    @functools.wraps(impl)
    def impl_for_device(self, op_name, fn, dispatch_key="", *, with_keyset=False, **options):
        key = dispatch_key or self.dispatch_key
        name = self._resolve_op_name(op_name, "impl").split("::")[-1]
        if key in KEYS.values():  # said of the device itself: it serves, whichever came first
            _give_up((self.ns, name, key))
        impl(self, op_name, fn, dispatch_key, with_keyset=with_keyset, **options)
        if key not in KEYS:
            return
        place = (self.ns, name, KEYS[key])
        said = "/".join(place) in torch.library._impls and place not in _taken
        if not said and _is_for_the_device(f"{self.ns}::{name}", KEYS[key], fn):
            take(self, place, op_name, fn, with_keyset)

    @functools.wraps(destroy)
    def destroy_for_device(self):
        for end in self.__dict__.pop("_ends_for_the_device", ()):
            end()
        destroy(self)

    Library.impl, Library._destroy = impl_for_device, destroy_for_device
