"""Builds relu2.cpp, gives the operator its derivative, and fits a curve with it.

python docs/examples/custom_op/relu2.py
"""

from pathlib import Path

import torch
from torch.utils import cpp_extension

import torch_openreg

HERE = Path(__file__).resolve().parent


def build():
    """Compiles once; later calls load what is there, unless the source has changed."""
    library = torch_openreg.get_library_dir()
    cpp_extension.load(
        name="relu2",
        sources=[str(HERE / "relu2.cpp")],
        extra_include_paths=[torch_openreg.get_include()],
        extra_cflags=["-O2", "-std=c++20"],
        # The core, and the module that Python has loaded, by its path.
        extra_ldflags=[
            f"-L{library}",
            "-lopenreg",
            f"-Wl,-rpath,{library}",
            torch_openreg._C.__file__,
        ],
        is_python_module=False,
    )


def keep(ctx, inputs, output):
    ctx.save_for_backward(*inputs)


def backward(ctx, grad):
    (x,) = ctx.saved_tensors
    return torch.ops.custom_op.relu2_backward(grad, x)


def register():
    torch.library.register_fake("custom_op::relu2", torch.empty_like)
    torch.library.register_autograd("custom_op::relu2", backward, setup_context=keep)


class SquaredReLU(torch.nn.Module):
    def forward(self, x):
        return torch.ops.custom_op.relu2(x)


def main():
    build()
    register()
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(1, 32), SquaredReLU(), torch.nn.Linear(32, 1)).to(
        "openreg"
    )
    x = torch.linspace(-2, 2, 256, device="openreg").unsqueeze(1)
    y = x.sin()
    optimizer = torch.optim.Adam(net.parameters(), lr=0.01)
    for step in range(301):
        optimizer.zero_grad()
        loss = torch.nn.functional.mse_loss(net(x), y)
        loss.backward()
        optimizer.step()
        if step % 100 == 0:
            print(f"step {step}: loss {loss.item():.5f}")
    if loss.item() > 0.01:
        raise SystemExit("did not learn")


if __name__ == "__main__":
    main()
