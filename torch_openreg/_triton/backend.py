"""Triton's compiler for the device: its front end makes TTIR, which becomes C++ and a library."""

from triton.backends.compiler import Language
from triton.backends.nvidia.compiler import CUDABackend

from . import cpp, library

CAPABILITY = 80


def _role(argument):
    """The letter that csrc/aten/triton_launch.cpp takes."""
    if argument.kind != "pointer":
        return {"float": "f", "integer": "i"}[argument.kind]
    return {(True, True): "b", (False, True): "w"}.get((argument.reads, argument.writes), "r")


class Compiler(CUDABackend):
    """Stands for a card of capability 8.0, as ``torch.cuda`` does under ``--as-cuda``. What it
    inherits decides how Triton's front end treats a kernel: options, types, ``libdevice``."""

    def __init__(self, target):
        super().__init__(target)
        self.binary_ext = "so"

    def parse_options(self, opts):
        # Without a value Triton warns that its default will change. The C++ ignores it (cpp.FLAGS).
        return super().parse_options(
            {**opts, "enable_fp_fusion": bool(opts.get("enable_fp_fusion"))}
        )

    def add_stages(self, stages, options, language):
        if language is not Language.TRITON:
            raise NotImplementedError(
                "a Gluon kernel is for one kind of GPU: only Triton's language is compiled here"
            )
        stages["ttir"] = lambda module, metadata: self.make_ttir(
            module, metadata, options, CAPABILITY
        )
        stages["cpp"] = self._make_cpp
        stages["so"] = lambda source, metadata: library.compiled(metadata["name"], source)

    @staticmethod
    def _make_cpp(module, metadata):
        text = str(module)
        source = cpp.generate(text)
        metadata.update(
            name=source.name,
            roles="".join(map(_role, source.arguments)),
            asserts=source.asserts,
            updated=[a.name for a in source.arguments if a.reads and a.writes],
            shared=0,
            ttir=text,  # from which checks.py makes its own code
        )
        return source.run

    def hash(self):
        return f"openreg-{library.version()}"

    def pack_metadata(self, metadata):
        return ()
