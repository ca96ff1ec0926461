"""PyTorch's builds for CUDA, on a machine without a GPU: the device is the accelerator, nothing
looks for NVIDIA's driver, and torch.cuda is what it is without the package."""

import os

import pytest
import torch

pytestmark = [
    pytest.mark.skipif(torch.version.cuda is None, reason="this PyTorch is not built for CUDA"),
    pytest.mark.skipif(os.path.exists("/dev/nvidiactl"), reason="there is a GPU"),
]

WITHOUT = {"TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}

USE = """
import torch
import torch.nn.functional as F
print(torch.accelerator.current_accelerator(), torch.accelerator.device_count())
torch.manual_seed(1)
net = torch.nn.Sequential(torch.nn.Conv2d(1, 4, 3), torch.nn.Flatten(), torch.nn.Linear(144, 3))
net.to("openreg:1")
optimizer = torch.optim.AdamW(net.parameters())
side = torch.Stream(device="openreg:1")
side.wait_stream(torch.accelerator.current_stream(1))
with side, torch.autocast("openreg"):
    loss = F.cross_entropy(net(torch.rand(2, 1, 8, 8).pin_memory().to("openreg:1")),
                           torch.tensor([0, 1], device="openreg:1"))
torch.accelerator.synchronize(1)
print(loss.isfinite().item(), torch.accelerator.memory_allocated(1) > 0)
"""

# The autograd engine's threads ask each type of device how many there are.
TRAIN = """
before = net[0].weight.detach().clone()
loss.backward()
optimizer.step()
print(before.equal(net[0].weight), net[0].weight.isfinite().all().item())
"""

CUDA = """
import torch
print(torch.cuda.is_available(), torch.cuda.device_count(), torch.cuda.is_initialized())
for call in (torch.cuda.init, lambda: torch.ones(2, device="cuda"), torch.cuda.current_device):
    try:
        print(call())
    except Exception as error:
        print(type(error), error)
"""


def looks_for_driver(done):
    """With LD_DEBUG=libs the linker says what it looks for. PyTorch's own import looks too."""
    assert done.code == 0, done.err
    return done.err.count("find library=libcuda.so")


def test_cuda_build_works_and_looks_for_no_driver(run):
    linker = {"LD_DEBUG": "libs"}
    plain = looks_for_driver(run("import torch", {**linker, **WITHOUT}))
    done = run(USE, linker)
    assert done.out.splitlines() == ["openreg 2", "True True"]
    assert looks_for_driver(done) == plain
    assert looks_for_driver(run(USE + "torch.cuda.is_available()", linker)) > plain


def test_cuda_build_trains_on_the_device(run_ok):
    assert run_ok(USE + TRAIN).splitlines()[2:] == ["False True"]


def test_cuda_build_keeps_torch_cuda_as_it_is(run):
    without, with_it = run(CUDA, WITHOUT), run(CUDA, fresh=True)
    assert (with_it.code, with_it.out, with_it.err) == (without.code, without.out, without.err)
    assert with_it.out.startswith("False 0 False\n<class 'RuntimeError'>")
    used = run(
        "import torch; torch.ones(2, device='openreg'); torch.accelerator.synchronize()" + CUDA
    )
    assert (used.code, used.out) == (without.code, without.out)
