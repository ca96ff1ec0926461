"""Extensions with CUDA's code in them: there is no compiler for it."""

import functools

from torch.utils import cpp_extension

from ._names import refusal


def _with_cuda(arguments):
    sources = arguments.get("sources") or ()
    sources = [sources] if isinstance(sources, str) else sources
    return (
        arguments.get("cuda_sources")
        or arguments.get("with_cuda")
        or any(str(source).endswith((".cu", ".cuh")) for source in sources)
    )


def _refuse_cuda(name):
    original = getattr(cpp_extension, name)

    @functools.wraps(original)
    def load(*args, **kwargs):
        order = ("name", "sources") if name == "load" else ("name", "cpp_sources", "cuda_sources")
        if _with_cuda({**dict(zip(order, args, strict=False)), **kwargs}):
            raise refusal(f"torch.utils.cpp_extension.{name} of CUDA sources")
        return original(*args, **kwargs)

    setattr(cpp_extension, name, load)


def _extension(*args, **kwargs):
    raise refusal("torch.utils.cpp_extension.CUDAExtension")


_refuse_cuda("load")
_refuse_cuda("load_inline")
cpp_extension.CUDAExtension = _extension
