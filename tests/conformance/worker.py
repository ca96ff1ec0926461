"""A process that compares one operator after another: jobs on stdin, results on stdout, one JSON
line each. With `--list` it prints the operators' names and dtypes."""

import json
import os
import random
import sys
import time
import traceback
import warnings

import numpy
import torch
from comparison import SEED, compare, compare_error
from jobs import DTYPES
from torch.testing._internal import common_methods_invocations
from torch.testing._internal.common_methods_invocations import op_db
from torch.utils._pytree import tree_leaves

OPERATORS = {op.formatted_name: op for op in op_db}


# Random operators seed themselves, on the CPU; seeds are ours here.
common_methods_invocations.wrapper_set_seed = lambda op, *args, **kwargs: op(*args, **kwargs)


def in_place(op):
    """On a copy, as autograd lets no leaf be written."""
    variant = op.get_inplace()
    return variant and (lambda x, *args, **kwargs: variant(x.clone(), *args, **kwargs))


def zeros(tensor):
    """Nothing undefined: some kernels leave parts of their output as they are."""
    return torch.zeros_like(tensor)


def nothing(tensor):
    return tensor.new_empty(0)


def wider(tensor):
    """Of a dtype that takes the result, and in which it is not computed."""
    wide = {True: torch.complex128, False: torch.float64}
    return torch.zeros_like(tensor, dtype=wide[tensor.is_complex() or tensor.is_floating_point()])


def replayed(function):
    """What a graph of the call gives, where it can be captured."""

    def call(*args, **kwargs):
        tensors = (t for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor))
        if all(t.device.type == "cpu" for t in tensors):
            return function(*args, **kwargs)
        graph = torch.openreg.Graph()
        try:
            with torch.openreg.graph(graph):
                result = function(*args, **kwargs)
        except RuntimeError as error:
            refused = ("orErrorStreamCapture", "draws random numbers and cannot be captured")
            if not any(text in str(error) for text in refused):
                raise
            return function(*args, **kwargs)
        graph.replay()
        return result

    return call


def into(op, make, way=None):
    """With `out=` made from what the result is."""
    way = way or op

    def call(x, *args, **kwargs):
        with torch.no_grad():
            made = op(x, *args, **kwargs)
        if isinstance(made, torch.Tensor):
            return way(x, *args, **kwargs, out=make(made))
        return way(x, *args, **kwargs, out=tuple(make(t) for t in made))

    return call


def dense(sample):
    return all(
        t.layout == torch.strided
        for t in tree_leaves((sample.input, sample.args, sample.kwargs))
        if isinstance(t, torch.Tensor)
    )


def plain(sample):
    return sample.transform(lambda t: t.detach() if isinstance(t, torch.Tensor) else t)


def spread(items, limit, turn):
    """At most so many, evenly from the whole; other ones for other turns."""
    if len(items) <= limit:
        return items
    return [items[(i * len(items) // limit + turn) % len(items)] for i in range(limit)]


def calls(op, dtype, limit, turn):
    """What the call is, function, sample, and whether gradients are compared."""
    grad = op.supports_autograd and dtype in op.supported_backward_dtypes("cpu")
    samples = spread(list(op.sample_inputs("cpu", dtype, requires_grad=grad)), limit, turn)
    if op.is_factory_function:
        for sample in samples:
            sample.kwargs.setdefault("device", "cpu")
    for sample in samples:
        yield "", op, sample, grad
    if samples:
        sample = samples[turn % len(samples)]
        if in_place(op):
            yield "in place: ", in_place(op), sample, grad and op.supports_inplace_autograd
        if dense(sample):
            yield "not contiguous: ", op, sample.noncontiguous(), grad
        if op.supports_out and dense(sample):
            yield "out=: ", into(op, zeros), plain(sample), False
            yield "empty out=: ", into(op, nothing), plain(sample), False
        if dense(sample) and (limit > 1 or dtype == torch.int32):
            yield "replayed: ", replayed(op), plain(sample), False
            if op.supports_out:
                yield "wider out=: ", into(op, wider), plain(sample), False
                yield "replayed wider out=: ", into(op, wider, replayed(op)), plain(sample), False


def run_samples(op, name, limit):
    count, found = 0, []
    turn = DTYPES.index(name)
    for what, function, sample, grad in calls(op, getattr(torch, name), limit, turn):
        count += 1
        found += [(kind, what + text) for kind, text in compare(op.name, function, sample, grad)]
    return count, found


def run_compiled(op, name):
    """One sample, compiled for each device; random numbers are drawn as without Inductor."""
    torch._dynamo.reset()
    call = next(calls(op, getattr(torch, name), 1, DTYPES.index(name)), None)
    if call is None:
        return 0, []
    _, function, sample, grad = call
    compiled = torch.compile(lambda x, *args, **kwargs: function(x, *args, **kwargs))
    with torch._inductor.config.patch(fallback_random=True, compile_threads=1):
        return 1, compare(op.name, compiled, sample, grad)


def run_errors(op):
    count, found = 0, []
    if op.error_inputs_func is None:
        return count, found
    for bad in op.error_inputs("cpu"):
        differences = compare_error(op, bad.sample_input)
        if differences is not None:
            count += 1
            found += differences
    return count, found


def run(job):
    random.seed(SEED)
    numpy.random.seed(SEED)
    torch.manual_seed(SEED)
    op = OPERATORS[job["op"]]
    start = time.monotonic()
    try:
        if job["dtype"] == "errors":
            count, found = run_errors(op)
        elif job["compiled"]:
            count, found = run_compiled(op, job["dtype"])
        else:
            count, found = run_samples(op, job["dtype"], job["limit"])
    except Exception:  # of the comparison itself
        count, found = 1, [("comparison", " ".join(traceback.format_exc().split())[-400:])]
    kinds = {}
    for kind, text in found:
        kinds.setdefault(kind, text)
    return {"count": count, "failures": kinds, "seconds": time.monotonic() - start}


def supported(op):
    names = [d for d in DTYPES if getattr(torch, d) in op.supported_dtypes("cpu")]
    return {
        "dtypes": names,
        "errors": op.error_inputs_func is not None,
    }


def main():
    # What a kernel prints must not get between the results.
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    if "--list" in sys.argv:
        json.dump({name: supported(op) for name, op in OPERATORS.items()}, out)
        out.flush()
        return
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    for line in sys.stdin:
        print(json.dumps(run(json.loads(line))), file=out, flush=True)


if __name__ == "__main__":
    main()
