"""A program gives on the device what it gives on the CPU: values, dtypes, strides; and there."""

import torch
from torch.utils._python_dispatch import TorchDispatchMode

# Not the current device, where there are two.
DEVICE = f"openreg:{torch.openreg.device_count() - 1}"
LOOSE = {torch.bfloat16: 0.03, torch.float16: 0.01}


def compare(got, expected):
    if isinstance(expected, torch.Tensor):
        assert got.device == torch.device(DEVICE)
        assert got.requires_grad == expected.requires_grad
        assert got.is_conj() == expected.is_conj() and got.is_neg() == expected.is_neg()
        loose = LOOSE.get(expected.dtype)
        rtol, atol = (loose, loose) if loose else (1e-4, 1e-5)
        if not (expected.is_floating_point() or expected.is_complex()):
            rtol = atol = 0
        torch.testing.assert_close(
            got.detach().cpu(), expected.detach(), rtol=rtol, atol=atol, equal_nan=True
        )
        assert got.stride() == expected.stride() or got.numel() < 2
    elif isinstance(expected, dict):
        assert list(got) == list(expected)
        compare(list(got.values()), list(expected.values()))
    elif isinstance(expected, list | tuple):
        assert len(got) == len(expected)
        for mine, theirs in zip(got, expected, strict=True):
            compare(mine, theirs)
    elif isinstance(expected, float):
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5, equal_nan=True)
    else:
        assert got == expected


def alike(program):
    """Calls program(device) for the CPU and twice for the device, which queues the second time what
    it had to learn the first time."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # a second team of threads beside the device's would slow both down
    try:
        torch.manual_seed(0)
        expected = program("cpu")
    finally:
        torch.set_num_threads(threads)
    for _ in range(2):
        torch.manual_seed(0)
        got = program(DEVICE)
        torch.openreg.synchronize(DEVICE)
        compare(got, expected)
    return got


def drawn(device, *sizes, dtype=torch.float32, requires_grad=True):
    """Numbers of the CPU's generator, a leaf on the device."""
    x = torch.randn(*sizes).to(dtype).to(device)
    return x.requires_grad_(requires_grad and (dtype.is_floating_point or dtype.is_complex))


def trained(module, *inputs):
    """Outputs, and all gradients of the sum of their squares."""
    outputs = module(*inputs)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    sum(out.square().sum() for out in outputs).backward()
    leaves = [x for x in inputs if isinstance(x, torch.Tensor) and x.requires_grad]
    gradients = [leaf.grad for leaf in (*leaves, *module.parameters())]
    return outputs, gradients, list(module.buffers())


class Recorder(TorchDispatchMode):
    """The names of the operators that were called in it."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.names.append(str(function))
        return function(*args, **(kwargs or {}))
