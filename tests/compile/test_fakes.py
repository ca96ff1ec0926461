"""Fake tensors, by which compilers plan: they promise what the kernels make."""

import pytest

# Some of those of which PyTorch's meta functions or decompositions ask for the device's name.
ASKING = {
    "fft.fft2",
    "fft.irfftn",
    "fft.rfftn",
    "linalg.eig",
    "linalg.svd",
    "native_batch_norm",
    "nn.functional.channel_shuffle",
    "nn.functional.conv2d",
    "nn.functional.embedding_bag",
    "nn.functional.logsigmoid",
    "nn.functional.max_unpool2d",
    "nn.functional.pixel_shuffle",
    "nn.functional.upsample_bilinear",
    "nonzero_static",
}
PROGRAM = """
import sys, warnings
import torch, torch_openreg
device = sys.argv[1]
if device == "cuda":
    torch_openreg.as_cuda()
warnings.simplefilter("ignore")
import layouts
names = {names}
checked, differences = layouts.compare(device, {dtypes}, {most}, names)
assert not differences, differences
print(len(checked))
"""


@pytest.mark.parametrize("device", ["openreg", pytest.param("cuda", marks=pytest.mark.slow)])
def test_operator_results_are_as_fake_tensors_promise(run, device):
    program = PROGRAM.format(names=ASKING, dtypes="{torch.float32}", most=2)
    done = run(program, arguments=["-c", program, device])
    assert done.code == 0 and int(done.out) > 40, done.err


@pytest.mark.slow
@pytest.mark.parametrize(
    "device,dtypes", [("openreg", "{torch.float32, torch.complex64}"), ("cuda", "{torch.float32}")]
)
def test_all_operator_results_are_as_fake_tensors_promise(run, device, dtypes):
    program = PROGRAM.format(names=None, dtypes=dtypes, most=2)
    done = run(program, arguments=["-c", program, device], timeout=3000)
    assert done.code == 0 and int(done.out) > 400, done.err
