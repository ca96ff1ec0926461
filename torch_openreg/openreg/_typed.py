"""Tensor and storage classes of one dtype, ``torch.openreg.FloatTensor(2)``: deprecated in PyTorch,
and widely used. PyTorch makes the tensor classes of CUDA and of the CPU in C++, without a way to
add another device's, but it accepts their names (``x.type("torch.openreg.FloatTensor")``). Its
storage classes take the name of the module that has them.
"""

import torch
from torch._utils import classproperty

from ._utils import OWN_MODULE, OWN_NAME, is_ours


class _TensorType(type):
    """The class of the tensor classes. They have no instances of their own: a tensor is an instance
    of the class with its device, dtype and layout."""

    def __new__(cls, module, name, dtype, layout):
        # PyTorch reads the full name from the C structure.
        own = {"__module__": module, "__qualname__": name}
        made = super().__new__(cls, f"{module}.{name}", (), own)
        made.dtype, made.layout = dtype, layout
        made.is_sparse, made.is_cuda = layout is torch.sparse_coo, False
        setattr(made, f"is_{OWN_NAME}", True)
        made.__doc__ = (
            f"``torch.{name}`` on the current device, in the layout {layout}. Its arguments are "
            f"those of torch.{name}; `isinstance(tensor, {OWN_MODULE}.{name})` asks for the "
            "device's type, the dtype and the layout."
        )
        return made

    def __init__(cls, *args):
        super().__init__(cls)

    __name__ = property(lambda cls: cls.__qualname__)

    def __call__(cls, *args, **kwargs):
        # PyTorch's own constructor, which takes the kind of tensor from an example.
        like = torch.empty(0, dtype=cls.dtype, layout=cls.layout, device=OWN_NAME)
        return like.new(*args, **kwargs)

    def __instancecheck__(cls, value):
        return (
            isinstance(value, torch.Tensor)
            and is_ours(value.device)
            and value.dtype is cls.dtype
            and value.layout is cls.layout
        )

    def __getattr__(cls, name):
        # Methods of tensors: FloatTensor.add(x, y). Names that protocols look up in an object are
        # left out.
        if name.startswith("__"):
            raise AttributeError(f"type object '{cls.__name__}' has no attribute '{name}'")
        return getattr(torch.Tensor, name)

    def __repr__(cls):
        return f"<class '{cls.__module__}.{cls.__name__}'>"


class _Storage(torch.storage._LegacyStorage):
    @classmethod
    def from_buffer(cls, *args, **kwargs):
        torch.storage._warn_typed_storage_removal()
        raise RuntimeError(f"from_buffer: Not available for {OWN_NAME} storage")

    @classmethod
    def _new_with_weak_ptr(cls, *args, **kwargs):
        raise RuntimeError(f"_new_with_weak_ptr: Not available for {OWN_NAME} storage")

    @classmethod
    def _new_shared_filename(cls, manager, obj, size, *, device=None, dtype=None):
        raise RuntimeError(f"_new_shared_filename: Not available for {OWN_NAME} storage")


def _storage_class(name, dtype):
    own = {"dtype": classproperty(lambda cls: dtype), "_dtype": classproperty(lambda cls: dtype)}
    doc = f"A ``torch.TypedStorage`` of {dtype} on the current device; PyTorch warns of its use."
    own |= {"__module__": OWN_MODULE, "__doc__": doc}
    return type(_Storage)(name, (_Storage,), own)


def tensor_classes(module):
    """torch.cuda's tensor classes, for ``torch.openreg`` or its ``sparse``: name to class."""
    layout = torch.sparse_coo if module.endswith("sparse") else torch.strided
    of_cuda = module.replace(OWN_MODULE, "torch.cuda")
    made = {
        theirs.__name__: _TensorType(module, theirs.__name__, theirs.dtype, layout)
        for theirs in sorted(torch._tensor_classes, key=lambda kind: kind.__name__)
        if theirs.__module__ == of_cuda
    }
    torch._tensor_classes.update(made.values())
    return made


def storage_classes():
    """torch.cuda's storage classes, from name to class."""
    made = {
        theirs.__name__: _storage_class(theirs.__name__, theirs._dtype)
        for theirs in sorted(torch._storage_classes, key=lambda kind: kind.__name__)
        if theirs.__module__ == "torch.cuda"
    }
    torch._storage_classes.update(made.values())
    return made
