"""Which libraries there are, and where their tests come from."""

import glob
import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
BUILD = os.path.join(ROOT, "build", "libraries")
HOW = """\
There are no tests of {name} {version} to run. Get its source tree:
  git clone --depth 1 --branch {tag} {repository} {place}
or name one: make libraries LIBRARY={name} SOURCE=folder"""


@dataclass(frozen=True)
class Library:
    name: str  # as pip knows it
    stated: str  # the file of the source tree that states its version
    files: str  # patterns of test files, separated by spaces
    repository: str = ""  # without one, pip's source distribution has the tests
    tag: str = "v{version}"
    without: str = ""  # files of which every test is skipped here, or needs a hub
    options: tuple = ()  # of pytest
    limit: float = 600  # seconds after which a test counts as hanging
    cpu_limit: float = 0  # seconds of CPU time for a test; 0: any
    memory: int = 0  # bytes of a device; 0: what the machine has

    @property
    def version(self):
        """The installed one, which .ci/libraries.txt pins."""
        return importlib.metadata.version(self.name)

    def paths(self, tree):
        """The test files, relative to the tree."""
        for pattern in self.files.split():
            found = sorted(glob.glob(pattern, root_dir=tree, recursive=True))
            if not found:
                sys.exit(f"{self.name}: there is no {pattern} in {tree}")
            yield from (file for file in found if file not in self.without.split())


LIBRARIES = (
    Library(
        "accelerate",
        "src/accelerate/__init__.py",
        "tests/test_*.py",
        without="tests/test_cpu.py tests/test_examples.py tests/test_imports.py "
        "tests/test_load_checkpoint_and_dispatch_with_broadcast.py tests/test_metrics.py "
        "tests/test_scheduler.py tests/test_tpu.py",
        # One rank may leave without joining the other in init_process_group, which waits for it
        # forever: Gloo connects the ranks there, NCCL at their first collective.
        options=(
            "--deselect",
            "tests/test_cli.py::AccelerateLauncherTester::test_notebook_launcher",
        ),
    ),
    Library(
        "torchao",
        "version.txt",
        "test/dtypes/test_*.py test/float8/test_base.py test/float8/test_float8_utils.py "
        "test/quantization/test_qat.py test/quantization/test_quant_api.py "
        "test/quantization/test_quant_primitives.py "
        "test/quantization/quantize_/workflows/intx/test_intx_unpacked_to_int8_tensor.py "
        "test/sparsity/test_supermask.py test/sparsity/test_wanda.py test/prototype/test_awq.py "
        "test/prototype/test_quantized_training.py test/prototype/test_smoothquant.py",
        "https://github.com/pytorch/ao",
        options=("-k", "not device_cpu"),
    ),
    Library(
        "diffusers",
        "src/diffusers/__init__.py",
        "tests/hooks/test_*.py tests/models/unets/test_models_unet_1d.py "
        "tests/models/unets/test_models_unet_2d.py",
        "https://github.com/huggingface/diffusers",
    ),
    Library(
        "lightning",
        "src/version.info",
        "tests/tests_fabric/accelerators/test_cuda.py "
        "tests/tests_fabric/test_connector.py "
        "tests/tests_fabric/test_wrappers.py "
        "tests/tests_fabric/strategies/test_ddp.py "
        "tests/tests_fabric/strategies/test_dp.py "
        "tests/tests_fabric/strategies/test_single_device.py "
        "tests/tests_fabric/plugins/collectives/test_torch_collective.py "
        "tests/tests_fabric/plugins/precision/test_all.py "
        "tests/tests_fabric/plugins/precision/test_amp.py "
        "tests/tests_fabric/plugins/precision/test_double.py "
        "tests/tests_fabric/plugins/precision/test_fsdp.py "
        "tests/tests_fabric/plugins/precision/test_half.py "
        "tests/tests_fabric/utilities/test_init.py "
        "tests/tests_fabric/utilities/test_device_*.py "
        "tests/tests_fabric/utilities/test_optimizer.py",
        "https://github.com/Lightning-AI/pytorch-lightning",
        tag="{version}",
    ),
    # Its tests of other compilers than Triton (cute, cutedsl, cutile) need a card. Those of
    # convergence train models for minutes.
    Library(
        "liger_kernel",
        "pyproject.toml",
        "test/ops/test_*.py test/transformers/test_*.py test/chunked_loss/test_*.py "
        "test/megatron/test_*.py test/triton/test_*.py",
        without="test/ops/test_cutedsl_shape_fallbacks.py test/transformers/test_embedding.py "
        "test/transformers/test_mm_int8int2.py test/transformers/test_qwen2vl_mrope.py",
        cpu_limit=120,
        memory=8 << 30,
    ),
)


def _download(library, place):
    """Unpacks the source distribution of the installed version."""
    folder = place + ".part"
    wanted = f"{library.name}=={library.version}"
    options = ("--no-deps", "--no-build-isolation", "--no-binary", library.name, "--dest", folder)
    pip = (sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check")
    subprocess.run([*pip, *options, wanted], check=True)
    (archive,) = glob.glob(os.path.join(folder, "*.tar.gz"))
    shutil.unpack_archive(archive, folder, filter="data")
    os.rename(archive.removesuffix(".tar.gz"), place)
    shutil.rmtree(folder)


def find_tree(library, named):
    """The source tree of the installed version; None if there is none."""
    place = os.path.join(BUILD, f"{library.name}-{library.version}")
    tree = os.path.abspath(named) if named else place
    if not named and not library.repository and not os.path.isdir(tree):
        _download(library, place)
    if not os.path.isdir(tree):
        if named:
            sys.exit(f"SOURCE={named}: there is no such folder")
        return None
    path = os.path.join(tree, library.stated)
    if not os.path.isfile(path):
        sys.exit(f"{tree} is no source tree of {library.name}: it has no {library.stated}")
    with open(path, encoding="utf-8") as file:
        if not re.search(rf"(?<![\d.]){re.escape(library.version)}(?![\w.])", file.read()):
            sys.exit(f"{path} is not of {library.name} {library.version}, which is installed")
    return tree


def how_to_get(library):
    version = library.version
    place = os.path.relpath(os.path.join(BUILD, f"{library.name}-{version}"), ROOT)
    return HOW.format(
        name=library.name,
        version=version,
        tag=library.tag.format(version=version),
        repository=library.repository,
        place=place,
    )
