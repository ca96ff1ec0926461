"""One call on the CPU and on the device, and how they differ.

The device is called twice with the same arguments: a first call with unknown metadata is tried by
the host before it is queued, and what that told is promised to the second. A difference is a pair
of its kind and a sentence.
"""

import os
from copy import copy
from dataclasses import dataclass, field

import torch
from torch.utils._pytree import tree_leaves, tree_map, tree_structure

from torch_openreg._check_plugin.operators import are_as_near

DEVICE = "openreg"
SEED = 1
OWN_KERNELS = "OPENREG_PLUGIN" in os.environ

# Results whose values nobody promises, in whole or where they grew.
UNDEFINED = {
    "empty",
    "empty_like",
    "empty_permuted",
    "empty_strided",
    "new_empty",
    "new_empty_strided",
    "resize_",
    "resize_as_",
}


@dataclass
class Outcome:
    result: object = None
    grads: list = field(default_factory=list)
    arguments: list = field(default_factory=list)  # after the call, which may have written them
    aliases: list = field(default_factory=list)  # which argument's memory a result has, and where
    cotangents: list = field(default_factory=list)  # what `grads` are made from
    error: Exception | None = None


def _tensors(tree):
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def placed(tree, device):
    """A copy of a sample's arguments on a device, with their strides, offsets and shared memory."""
    wholes = {}

    def whole(tensor):
        storage = tensor.untyped_storage()
        key = storage._cdata, tensor.dtype
        if key not in wholes:
            count = storage.nbytes() // tensor.element_size()
            flat = torch.empty(0, dtype=tensor.dtype).set_(storage, 0, (count,))
            wholes[key] = flat.to(device, copy=True)
        return wholes[key]

    def place(leaf):
        if isinstance(leaf, torch.device):
            return torch.device(device)
        if leaf == "cpu" and isinstance(leaf, str):
            return device
        if isinstance(leaf, torch.Generator):
            return torch.Generator(device).manual_seed(leaf.initial_seed())
        if not isinstance(leaf, torch.Tensor):
            return leaf
        tensor = leaf.detach()
        if leaf.layout != torch.strided or leaf.is_quantized or leaf.device.type != "cpu":
            made = tensor.to(device) if leaf.device.type == "cpu" else tensor
        else:
            made = whole(leaf).as_strided(leaf.size(), leaf.stride(), leaf.storage_offset())
            made = made.conj() if leaf.is_conj() else made
            made = torch._neg_view(made) if leaf.is_neg() else made
        return made.detach().requires_grad_(leaf.requires_grad)

    return tree_map(place, tree)


def _cotangent(tensor, number):
    """Different numbers for each element, so that a gradient in the wrong place shows."""
    generator = torch.Generator().manual_seed(number)
    wide = torch.complex128 if tensor.is_complex() else torch.float64
    values = torch.randn(tensor.shape, generator=generator, dtype=wide)
    return values.to(tensor.dtype).to(tensor.device)


def _gradients(inputs, result, given):
    """And the cotangents: `given`, or new ones."""
    outputs = [t for t in _tensors(result) if t.requires_grad]
    outputs = [t if t.layout == torch.strided else t.to_dense() for t in outputs]
    if not outputs:
        return [], []
    wanted = [t for t in _tensors(inputs) if t.requires_grad]
    seeds = [
        given[i].to(t.device, t.dtype) if given else _cotangent(t, i) for i, t in enumerate(outputs)
    ]
    return list(torch.autograd.grad(outputs, wanted, seeds, allow_unused=True)), seeds


def _aliases(inputs, result):
    def storage(tensor):
        return tensor.untyped_storage()._cdata if tensor.layout == torch.strided else None

    known = {storage(t): i for i, t in enumerate(inputs)}
    results = [(known.get(storage(t)), t) for t in _tensors(result)]
    return [None if i is None else (i, t.storage_offset()) for i, t in results]


def attempt(function, sample, device, grad, seed=SEED, cotangents=()):
    inputs = placed((sample.input, tuple(sample.args), dict(sample.kwargs)), device)
    first, arguments, keywords = inputs
    outcome = Outcome()
    try:
        torch.manual_seed(seed)
        outcome.result = function(first, *arguments, **keywords)
        outcome.arguments = _tensors(inputs)
        outcome.aliases = _aliases(outcome.arguments, outcome.result)
        if grad:
            result = sample.output_process_fn_grad(outcome.result)
            outcome.grads, outcome.cotangents = _gradients(inputs, result, cotangents)
        if device != "cpu":
            torch.accelerator.synchronize()
    except Exception as error:
        outcome.error = error
        if device != "cpu":
            _settle()
    return outcome


def _settle():
    """What else had failed belongs to the same call."""
    try:
        torch.accelerator.synchronize()
    except Exception as error:
        return error


def _first_line(error):
    return (str(error).splitlines() or [""])[0]


def _message(error):
    line = _first_line(error)
    for name in (f"{DEVICE}:0", DEVICE, "privateuseone:0", "privateuseone", "PrivateUse1"):
        line = line.replace(name, "cpu")
    return line


def _described(error):
    return f"{type(error).__name__}: {_first_line(error)[:200]}"


def _errors(got, expected):
    if got is None:
        yield "no error", f"the CPU raises {_described(expected)}"
    elif expected is None:
        yield "error", _described(got)
    elif type(got) is not type(expected):
        yield "error type", f"{_described(got)}; the CPU raises {_described(expected)}"
    elif _message(got) != _message(expected):
        yield "message", f"{_message(got)[:200]!r}; the CPU says {_message(expected)[:200]!r}"


def _strides(tensor):
    """Those that decide where an element is."""
    if tensor.numel() == 0:
        return ()
    return tuple(
        stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if size > 1
    )


def _metadata(got, expected):
    yield "device", got.device.type, DEVICE
    for name in ("dtype", "shape", "layout", "requires_grad"):
        yield name, getattr(got, name), getattr(expected, name)
    if got.layout == expected.layout == torch.strided and got.shape == expected.shape:
        yield "strides", _strides(got), _strides(expected)
    yield "conj", got.is_conj(), expected.is_conj()
    yield "neg", got.is_neg(), expected.is_neg()


def _on_host(tensor):
    return tensor.detach().cpu()


def same_values(got, expected):
    got, expected = _on_host(got), _on_host(expected)
    if got.dtype == torch.complex32:  # the CPU cannot subtract them
        got, expected = got.to(torch.complex64), expected.to(torch.complex64)
    if got.layout == torch.strided and not got.is_quantized and torch.equal(got, expected):
        return None
    try:
        torch.testing.assert_close(got, expected, equal_nan=True)
    except AssertionError as error:
        return " ".join(str(error).split())[:200]
    return None


def _trees(got, expected, what):
    """The differences of two results; values are left out where the metadata differs."""
    if tree_structure(got) != tree_structure(expected):
        yield (
            what + "structure",
            f"{tree_structure(got)}, on the CPU {tree_structure(expected)}"[:200],
        )
        return
    for a, b in zip(tree_leaves(got), tree_leaves(expected), strict=True):
        if not (isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor)):
            if type(a) is not type(b):
                yield what + "structure", f"{type(a)}, on the CPU {type(b)}"
            elif isinstance(a, (int, float, complex, bool, str)) and a != b and a == a:
                yield what + "values", f"{a}, on the CPU {b}"
            continue
        names = set()
        for name, x, y in _metadata(a, b):
            if x != y:
                names.add(name)
                yield what + name, f"{x}, on the CPU {y}"
        if not names & {"dtype", "shape", "layout"} and (text := same_values(a, b)):
            yield what + "values", text


def differences(got, expected):
    if got.error is not None or expected.error is not None:
        yield from _errors(got.error, expected.error)
        return
    yield from _trees(got.result, expected.result, "")
    yield from _trees(got.grads, expected.grads, "gradient's ")
    yield from _trees(got.arguments, expected.arguments, "argument's ")
    if got.aliases != expected.aliases:
        yield "aliases", f"{got.aliases}, on the CPU {expected.aliases}"


def _is_values(difference):
    return difference[0].endswith("values")


def _is_random(run, expected):
    """The CPU does not agree with itself; several seeds, as few random bits may agree for one."""
    return any(
        any(_is_values(d) for d in differences(run("cpu", seed), expected))
        for seed in range(SEED + 1, SEED + 20)
    )


def _wide(leaf):
    if not isinstance(leaf, torch.Tensor) or leaf.layout != torch.strided:
        return leaf
    if not (leaf.is_floating_point() or leaf.is_complex()):
        return leaf
    wide = leaf.detach().to(torch.complex128 if leaf.is_complex() else torch.float64)
    return wide.requires_grad_(leaf.requires_grad)


def _are_as_near(function, sample, grad, got, expected):
    """Whether a driver's own kernels, which round in another way than the CPU's, are as near to the
    values in float64."""
    if not OWN_KERNELS:
        return False
    wide = copy(sample)
    wide.input, wide.args, wide.kwargs = tree_map(_wide, (wide.input, wide.args, wide.kwargs))
    exact = attempt(function, wide, "cpu", grad, cotangents=expected.cotangents)
    if exact.error is not None:
        return False
    leaves = [
        [_on_host(t) for t in _tensors((o.result, o.grads, o.arguments))]
        for o in (got, expected, exact)
    ]
    if len({len(tensors) for tensors in leaves}) > 1:
        return False
    triples = [
        (a, b, c)
        for a, b, c in zip(*leaves, strict=True)
        if same_values(a, b) and a.dtype == b.dtype and a.shape == b.shape
    ]
    return bool(triples) and are_as_near(*zip(*triples, strict=True))


def compare(name, function, sample, grad):
    """All the differences of one call."""

    def run(device, seed=SEED):
        return attempt(function, sample, device, grad, seed)

    expected = run("cpu")
    first = run(DEVICE)
    second = run(DEVICE)
    found = list(differences(first, expected))
    found += [
        (kind, "queued: " + text) for kind, text in differences(second, expected) if not found
    ]
    if name in UNDEFINED:
        return [d for d in found if not _is_values(d)]
    if not any(_is_values(d) for d in found):
        return found
    others = [d for d in found if not _is_values(d)]
    if _is_random(run, expected):
        return others + [
            ("determinism", text)
            for kind, text in differences(second, first)
            if _is_values((kind, text))
        ]
    return others if _are_as_near(function, sample, grad, first, expected) else found


def compare_error(function, sample):
    """Bad arguments; nothing if the CPU takes them."""
    expected = attempt(function, sample, "cpu", False)
    if expected.error is None:
        return None
    return list(differences(attempt(function, sample, DEVICE, False), expected))
