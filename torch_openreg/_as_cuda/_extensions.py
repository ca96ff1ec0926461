"""Refuses extensions that contain CUDA code: there is no compiler for it."""

from torch.utils import cpp_extension

from .._patches import replace, wrap
from ._names import refusal, refusing

_EXTENSION = "torch.utils.cpp_extension.CUDAExtension"


def _with_cuda(arguments):
    sources = arguments.get("sources") or ()
    sources = [sources] if isinstance(sources, str) else sources
    return (
        arguments.get("cuda_sources")
        or arguments.get("with_cuda")
        or any(str(source).endswith((".cu", ".cuh")) for source in sources)
    )


def _refuse_cuda(original, *args, **kwargs):
    name = original.__name__
    order = ("name", "sources") if name == "load" else ("name", "cpp_sources", "cuda_sources")
    if _with_cuda({**dict(zip(order, args, strict=False)), **kwargs}):
        raise refusal(f"torch.utils.cpp_extension.{name} of CUDA sources")
    return original(*args, **kwargs)


wrap("torch.utils.cpp_extension.load", _refuse_cuda)
wrap("torch.utils.cpp_extension.load_inline", _refuse_cuda)
replace(_EXTENSION, refusing(_EXTENSION, cpp_extension.CUDAExtension))
