"""Without a GPU, "cuda" means the device of torch_openreg in the tests."""

import pytest
import torch

if not torch.cuda.is_available():
    import torch_openreg

    torch_openreg.as_cuda()


@pytest.fixture
def device():
    return torch.device("cuda")
