"""What Inductor does by CUDA's name, and for Triton's kernels alone. Imported after its config."""

from .._patches import replace

replace("torch._inductor.config.online_softmax", False)
