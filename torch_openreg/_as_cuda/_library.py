"""Kernels that a program registers for CUDA's dispatch keys, from Python."""

import contextlib
import functools
import itertools
import weakref

import torch
from torch.library import Library

from .. import _C
from .._patches import replace, wrap

KEYS = {
    f"{kind}CUDA": f"{kind}PrivateUse1"
    for kind in ("", "Autograd", "Autocast", "Sparse", "SparseCsr", "Quantized", "NestedTensor")
}
# PyTorch's own modules for a GPU: they need its compiler, its libraries or its links.
OF_A_CARD = ("torch._native", "torch.nn.attention", "torch.distributed._symmetric_memory")


def _is_for_the_device(name, key, fn):
    """Of PyTorch's own kernels, takes only those that are missing."""
    module = getattr(fn, "__module__", None) or ""
    if not module.startswith("torch."):
        return True
    if module.startswith(OF_A_CARD):
        return False
    return not torch._C._dispatch_has_kernel_for_dispatch_key(name, key)


class _Place:
    """One operator under one of the device's keys. The newest kernel that a library has registered
    there for CUDA serves, unless there is one for the device itself."""

    def __init__(self, namespace, key):
        self._namespace, self._key = namespace, key
        self._for_cuda = []  # (library's number, arguments of Library.impl)
        self._for_the_device = []  # libraries' numbers
        self._serving = self._library = None

    def add(self, number, operator, fn, with_keyset):
        self._for_cuda.append((number, (operator, fn, with_keyset)))
        self._serve()

    @contextlib.contextmanager
    def give_way(self, number):
        """Called when the library registers a kernel for the device itself, which lasts from then
        on."""
        self._for_the_device.append(number)
        self._serve()
        try:
            yield
        except BaseException:
            self._for_the_device.remove(number)
            self._serve()
            raise

    def forget(self, number):
        self._for_cuda = [kernel for kernel in self._for_cuda if kernel[0] != number]
        self._for_the_device = [other for other in self._for_the_device if other != number]
        self._serve()

    def _serve(self):
        kernel = self._for_cuda[-1] if self._for_cuda and not self._for_the_device else None
        if kernel is self._serving:
            return
        self._serving = kernel
        if self._library is not None:
            self._library._destroy()
            self._library = None
        if kernel is not None:
            operator, fn, with_keyset = kernel[1]
            self._library = Library(self._namespace, "IMPL")
            _impl(self._library, operator, fn, self._key, with_keyset=with_keyset)


def _impl(*args, impl=Library.impl, **options):
    """Calls PyTorch's own. Registrations in C++ pass csrc/torch/cuda_registrations.cpp."""
    before = _C._set_registering_from_python(True)
    try:
        impl(*args, **options)
    finally:
        _C._set_registering_from_python(before)


_places = {}  # by namespace, operator and the device's key
_numbers = itertools.count()


class _Member:
    """A library that has registered kernels."""

    def __init__(self, library):
        self.number = next(_numbers)
        self._namespace, self._places = library.ns, set()
        self.end = weakref.finalize(library, self._forget, library.m)
        self.end.atexit = False

    def place(self, name, key):
        known = (self._namespace, name, key)
        place = _places.setdefault(known, _Place(self._namespace, key))
        self._places.add(place)
        return place

    def _forget(self, registrations):
        if registrations is not None:
            registrations.reset()  # the library's own go first
        for place in self._places:
            place.forget(self.number)

    @classmethod
    def of(cls, library):
        member = library.__dict__.get("_member")
        if member is None:
            member = library._member = cls(library)
        return member


def _exclude_autocast_of_the_device():
    """Runs where CUDA's key is excluded, as a kernel for it does before it calls its operator
    again."""
    guard = torch._C._ExcludeDispatchKeyGuard
    keys, key_set = torch._C.DispatchKey, torch._C.DispatchKeySet

    @functools.wraps(guard, updated=())
    def guard_for_device(excluded):
        if excluded.has(keys.AutocastCUDA):
            excluded = excluded | key_set(keys.AutocastPrivateUse1)
        return guard(excluded)

    replace("torch._C._ExcludeDispatchKeyGuard", guard_for_device)


def _forget(destroy, library):
    member = library.__dict__.pop("_member", None)
    destroy(library)
    if member is not None:
        member.end()


def install():
    said_before = frozenset(torch.library._impls)

    def impl_for_device(_, library, op_name, fn, dispatch_key="", *, with_keyset=False, **options):
        key = dispatch_key or library.dispatch_key
        name = library._resolve_op_name(op_name, "impl").split("::")[-1]
        way = contextlib.nullcontext()
        if key in KEYS.values():
            member = _Member.of(library)
            way = member.place(name, key).give_way(member.number)
        with way:
            _impl(library, op_name, fn, dispatch_key, with_keyset=with_keyset, **options)
        if key not in KEYS or f"{library.ns}/{name}/{KEYS[key]}" in said_before:
            return
        if _is_for_the_device(f"{library.ns}::{name}", KEYS[key], fn):
            member = _Member.of(library)
            member.place(name, KEYS[key]).add(member.number, op_name, fn, with_keyset)

    wrap("torch.library.Library.impl", impl_for_device)
    wrap("torch.library.Library._destroy", _forget)
    _exclude_autocast_of_the_device()
