"""What fake tensors promise of an operator's results, against what its kernel makes.

Programs import this, as it is for the name that the device has in the process.
"""

import contextlib
import itertools

import torch
import torch._dynamo
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
    UnsupportedOperatorException,
)
from torch.testing._internal.common_methods_invocations import op_db
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

FAILURES = AssertionError, NotImplementedError, RuntimeError, TypeError, ValueError
UNKNOWN = DataDependentOutputException, DynamicOutputShapeException, UnsupportedOperatorException


def _described(tree):
    """Sizes, strides where they matter, dtypes and devices."""
    tensors = [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, torch.Tensor)]
    return [
        (
            tuple(t.size()),
            [s for n, s in zip(t.size(), t.stride(), strict=True) if n > 1 and t.numel()],
            t.dtype,
            t.device,
        )
        for t in tensors
    ]


class Compared(TorchDispatchMode):
    """Calls each operator with fake tensors too, and keeps how their results differ."""

    def __init__(self):
        super().__init__()
        self.checked, self.differences = set(), {}

    def _faked(self, func, args, kwargs):
        """Its results on fake tensors; None where these cannot be said."""
        tensors = [t for t in pytree.arg_tree_leaves(*args, **kwargs) if torch.is_tensor(t)]
        plain = (t.layout == torch.strided and not t.is_quantized for t in tensors)
        if func.namespace != "aten" or not all(plain):
            return None
        try:
            with FakeTensorMode(allow_fallback_kernels=False) as mode:
                fakes = pytree.tree_map_only(torch.Tensor, mode.from_tensor, (args, kwargs))
                return func(*fakes[0], **fakes[1])
        except UNKNOWN:
            return None

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        fake = self._faked(func, args, kwargs)
        real = func(*args, **kwargs)
        if fake is not None:
            self.checked.add(str(func))
            promised, made = _described(fake), _described(real)
            if promised != made:
                self.differences.setdefault(str(func), f"{promised} is promised, {made} made")
        return real


def _has_images(sample):
    """Whether a tensor has four dimensions, and so a layout with its channels last."""
    leaves = pytree.tree_leaves((sample.input, tuple(sample.args), dict(sample.kwargs)))
    return any(isinstance(leaf, torch.Tensor) and leaf.dim() == 4 for leaf in leaves)


def _placed(tree, device, channels_last):
    def place(leaf):
        if not isinstance(leaf, torch.Tensor):
            return device if leaf in ("cpu", torch.device("cpu")) else leaf
        tensor = leaf.detach().to(device)
        if channels_last and tensor.dim() == 4:
            tensor = tensor.to(memory_format=torch.channels_last)
        return tensor.requires_grad_(leaf.requires_grad)

    return pytree.tree_map(place, tree)


def _call(operator, sample, device, channels_last):
    given = sample.input, tuple(sample.args), dict(sample.kwargs)
    first, arguments, keywords = given = _placed(given, device, channels_last)
    made = operator(first, *arguments, **keywords)
    wanted = [t for t in pytree.tree_leaves(given) if torch.is_tensor(t) and t.requires_grad]
    outputs = [t for t in pytree.tree_leaves(made) if torch.is_tensor(t) and t.requires_grad]
    outputs = [t for t in outputs if t.layout == torch.strided]
    if wanted and outputs:
        torch.autograd.grad(outputs, wanted, [*map(torch.ones_like, outputs)], allow_unused=True)


def compare(device, dtypes, most, names=None):
    """So many samples of each operator of PyTorch's database, or of those of these names, and their
    gradients. Returns what was compared and the differences by operator."""
    compared = Compared()
    for operator in op_db:
        if names is not None and operator.name not in names:
            continue
        for dtype in operator.dtypes & dtypes:
            grad = operator.supports_autograd and (dtype.is_floating_point or dtype.is_complex)
            samples = operator.sample_inputs("cpu", dtype, requires_grad=grad)
            for sample in itertools.islice(samples, most):
                for channels_last in (False, True)[: 1 + _has_images(sample)]:
                    # What fails here is for the operator database's own tests.
                    with contextlib.suppress(*FAILURES), compared:
                        _call(operator, sample, device, channels_last)
    return compared.checked, compared.differences
