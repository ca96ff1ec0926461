"""What Inductor does by CUDA's name, and for Triton's kernels alone. Imported after its config."""

from torch._inductor import config

config.online_softmax = False
