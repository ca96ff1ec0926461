"""The checks of a plugin that need PyTorch: its kernels by the operator database, and training."""

import contextlib
import os

from .checks import END, Broken, Skipped, check, expect

NAMES = 'with namespace and overload, such as "aten::add.Tensor"'
RUN = "Runs inside a task, in the order of the stream, as `copy` of the factory does."
DTYPES = ("float32", "float64", "bfloat16", "int64", "bool")
SAMPLES = 4  # of an operator and a dtype
UNWRITTEN = ("empty", "new_empty", "resize")  # whose results have no promised values
ON_HOST = ("tensor_split",)  # which take tensors of the CPU


def kernels(c):
    c.device_count()
    names = c.operators()
    if not names:
        raise Skipped("the factory has no kernels of its own")
    return names


@check("operators.names", "operators", NAMES, torch=True)
def operators_names(c):
    """each kernel has the name of an operator"""
    import torch

    unknown = []
    for name in kernels(c):
        try:
            torch._C._dispatch_find_schema_or_throw(*_split(name))
        except RuntimeError:
            unknown.append(name)
    expect(not unknown, f"PyTorch has no operator {', '.join(unknown)}")


def _split(name):
    """The operator and its overload."""
    name, _, overload = name.partition(".")
    return name, overload


def _database():
    try:
        from torch.testing._internal.common_methods_invocations import op_db
    except ImportError as error:
        raise Skipped(f"PyTorch's operator database needs {error.name}") from None
    return op_db


def _recorder():
    """A mode that keeps the names of the operators called."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class Recorder(TorchDispatchMode):
        def __init__(self):
            super().__init__()
            self.names = set()

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            self.names.add(func.name())
            return func(*args, **kwargs or {})

    return Recorder()


def _samples(op, dtype):
    """A few, from all over the list, and one for each set of keywords: not in halves, where a loss
    may differ by its rounding alone."""
    import torch

    dtype = getattr(torch, dtype)
    if dtype not in op.supported_dtypes("cpu"):
        return []
    grad = op.supports_autograd and dtype in op.supported_backward_dtypes("cpu")
    found = list(op.sample_inputs("cpu", dtype, requires_grad=grad and dtype == torch.float32))
    if len(found) <= SAMPLES:
        return found
    few = [found[i * len(found) // SAMPLES] for i in range(SAMPLES)]
    if dtype == torch.bfloat16:
        return few
    missing = {frozenset(sample.kwargs): sample for sample in reversed(found)}
    for sample in few:
        missing.pop(frozenset(sample.kwargs), None)
    return few + list(missing.values())


def _call(op, sample, device, dtype=None):
    """The results of a call, with its floats in `dtype`, and the gradients of its arguments."""
    import torch
    from torch.utils._pytree import tree_leaves, tree_map

    def place(leaf):
        if not isinstance(leaf, torch.Tensor):
            return device if isinstance(leaf, str) and leaf == "cpu" else leaf
        kind = dtype if leaf.is_floating_point() else None
        copy = leaf.detach().to(device, kind, copy=True)
        return copy.requires_grad_(leaf.requires_grad)

    torch.manual_seed(1)
    first, *rest = tree_map(place, (sample.input, *sample.args))
    keywords = tree_map(place, sample.kwargs)
    result = op(first, *rest, **keywords)
    tensors = [t for t in tree_leaves(result) if isinstance(t, torch.Tensor)]
    outputs = [t for t in tensors if t.requires_grad and t.is_floating_point()]
    wanted = [
        t for t in tree_leaves((first, rest, keywords))
        if isinstance(t, torch.Tensor) and t.requires_grad
    ]  # fmt: skip
    if outputs and wanted:
        loss = sum(t.float().square().sum() for t in outputs)
        grads = torch.autograd.grad(loss, wanted, allow_unused=True)
        tensors += [grad for grad in grads if grad is not None]
    return [t.detach().cpu() for t in tensors]


def _difference(got, expected):
    import torch

    for a, b in zip(got, expected, strict=True):
        try:
            torch.testing.assert_close(a, b, equal_nan=True)
        except AssertionError as error:
            return " ".join(str(error).split())[:200]
    return None


def _compare(op, sample):
    """What is wrong with a call, or None."""
    try:
        expected = _call(op, sample, "cpu")
    except Exception:  # the CPU refuses it
        return None
    try:
        got = _call(op, sample, "openreg")
    except Exception as error:
        return f"{type(error).__name__}: {str(error).partition(chr(10))[0][:200]}"
    wrong = _difference(got, expected)
    # One that draws random numbers gives others; a sum that cancels depends on its order.
    allowed = wrong and (_is_random(op, sample) or _is_as_near(op, sample, got, expected))
    return None if allowed else wrong


def _is_as_near(op, sample, got, expected):
    """Whether the device's results are as near to the values in float64 as the CPU's."""
    import torch

    try:
        exact = _call(op, sample, "cpu", torch.float64)
    except Exception:  # PyTorch has many types for an operator that is not for float64
        return False
    return are_as_near(got, expected, exact)


def are_as_near(got, expected, exact):
    """Whether the device's tensors are as near to the exact ones as the CPU's."""
    return all(
        a.shape == b.shape == c.shape
        and a.dtype == b.dtype
        and a.is_floating_point()
        and (_error(a, c) <= _allowed(b, c)).all()
        for a, b, c in zip(got, expected, exact, strict=True)
    )


def _error(result, exact):
    equal = (result == exact) | (result.isnan() & exact.isnan())
    return (result - exact).abs().masked_fill(equal, 0)


def _allowed(expected, exact):
    """The errors that may be, by those of the CPU: of halves for each element, else 8 times the
    greatest."""
    import torch

    sizes = exact.abs().nan_to_num(0, 0, 0)
    least, errors = torch.finfo(expected.dtype).eps * sizes, _error(expected, exact).nan_to_num(0)
    if expected.dtype in (torch.float16, torch.bfloat16) or exact.numel() == 0:
        return torch.maximum(errors, 2 * least)
    return 8 * torch.maximum(errors.max(), least.max())


def _is_random(op, sample):
    import torch

    seeds = []
    for _ in range(3):
        torch.manual_seed(len(seeds) + 2)
        original, torch.manual_seed = torch.manual_seed, lambda seed: None
        try:
            seeds.append(_call(op, sample, "cpu"))
        finally:
            torch.manual_seed = original
    return any(_difference(seeds[0], other) for other in seeds[1:])


def _used(op):
    """The operators that a call in float32 or int64 makes on the CPU, by the first sample."""
    import torch

    for dtype in (torch.float32, torch.int64):
        if dtype not in op.supported_dtypes("cpu"):
            continue
        grad = op.supports_autograd and dtype == torch.float32
        sample = next(iter(op.sample_inputs("cpu", dtype, requires_grad=grad)), None)
        if sample is None:
            continue
        with _recorder() as recorder, contextlib.suppress(Exception):
            _call(op, sample, "cpu")
        return recorder.names
    return set()


def _fits(op, sample):
    """Only dense tensors, and no generator: others have no kernel in a table."""
    import torch
    from torch.utils._pytree import tree_leaves

    leaves = tree_leaves((sample.input, sample.args, sample.kwargs))
    return not op.name.startswith((*UNWRITTEN, *ON_HOST)) and all(
        not isinstance(leaf, torch.Generator)
        and (not isinstance(leaf, torch.Tensor) or leaf.layout == torch.strided)
        for leaf in leaves
    )


@check("operators.values", "run", RUN, torch=True)
def operators_values(c):
    """each kernel gives the CPU's values, for samples of PyTorch's operator database"""
    import warnings

    import torch

    from torch_openreg import _C

    names, count = set(kernels(c)), 0
    behind = int(os.environ["CHECK_PLUGIN_BEHIND"])
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    for index, op in enumerate(_database()):
        used = _used(op) & names if index > behind else set()
        if not used:
            continue
        c.report("begin", index)
        c.step("run", f"calling {op.formatted_name} ({', '.join(sorted(used))})")
        for dtype in DTYPES:
            for sample in _samples(op, dtype):
                count += 1
                wrong = _compare(op, sample) if _fits(op, sample) else None
                if wrong:
                    c.report("wrong", f"{op.formatted_name} in {dtype}: {wrong}")
                    break
    idle = sorted(names - _C._own_kernels())
    if len(idle) == len(names):
        raise Skipped(f"{count} calls, and `accepts` of {len(names)} kernels took none")
    never = f", never {', '.join(idle)}" if idle else ""
    return f"{count} calls; {len(names) - len(idle)} of {len(names)} kernels ran{never}"


@check("training.loop", "copy", END, torch=True)
def training_loop(c):
    """a small network trains as on the CPU"""
    import torch

    def train(device):
        torch.manual_seed(0)
        net = torch.nn.Sequential(torch.nn.Linear(20, 32), torch.nn.ReLU(), torch.nn.Linear(32, 3))
        data, target = torch.randn(64, 20), torch.randint(3, (64,))
        net, data, target = net.to(device), data.to(device), target.to(device)
        optimizer, losses = torch.optim.Adam(net.parameters(), lr=0.01), []
        for _ in range(5):
            loss = torch.nn.functional.cross_entropy(net(data), target)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        return losses

    expected = train("cpu")
    c.step("run" if c.operators() else "copy", "training a small network")
    got = train("openreg")
    if any(abs(a - b) > 1e-4 * max(1, abs(b)) for a, b in zip(got, expected, strict=True)):
        raise Broken(f"the losses are {got}, on the CPU {expected}", c.last[0])
