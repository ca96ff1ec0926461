"""Builds the driver, a shared library in C, against the headers and the library of torch_openreg.
The metadata is in pyproject.toml."""

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

import torch_openreg

FLAGS = ["-std=c11", "-D_GNU_SOURCE", "-Wall", "-Wextra", "-fvisibility=hidden", "-pthread"]


class BuildDriver(build_ext):
    def get_ext_filename(self, name):
        return name.replace(".", "/") + ".so"  # a library for any Python

    def get_export_symbols(self, extension):
        return []


driver = Extension(
    "torch_acme.driver",
    ["driver.c"],
    include_dirs=[torch_openreg.get_include()],
    library_dirs=[torch_openreg.get_library_dir()],
    libraries=["openreg"],  # at run time torch_openreg has loaded it
    extra_compile_args=FLAGS,
    extra_link_args=["-pthread"],
)
setup(ext_modules=[driver], cmdclass={"build_ext": BuildDriver})
