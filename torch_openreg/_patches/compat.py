"""What PyTorch does by itself from some version on. Each part names that version, and is removed
when support for the earlier ones ends.
"""

import torch

from .. import _C
from . import wrap


def on_first_use():
    """Patches that matter only once there can be a tensor of ours."""
    if torch.__version__ < "2.15":
        name = "torch.optim.Optimizer._accelerator_graph_capture_health_check"
        wrap(name, _check_optimizers)


def _check_optimizers(check_theirs, optimizer):
    """Operators whose state a capture would freeze, as on CUDA."""
    check_theirs(optimizer)
    if torch.compiler.is_compiling() or not _C._is_current_stream_capturing():
        return  # Dynamo does not trace its callers, as in PyTorch's own check
    if not all(group["capturable"] for group in optimizer.param_groups):
        raise RuntimeError(
            f"Attempting graph capture of step() for an instance of {type(optimizer).__name__} but "
            "param_groups' capturable is False."
        )
