"""What Inductor does for CUDA's name, and only for Triton's kernels. Imported after its config."""

from .._patches import replace

replace("torch._inductor.config.online_softmax", False)
