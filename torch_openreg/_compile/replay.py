"""mode="reduce-overhead": what a compiled graph queues is captured once, and replayed."""

import threading

import torch
from torch._inductor.compile_fx import (
    clone_preserve_strides,
    get_expanded_dims,
    index_expanded_dims_and_copy_,
    static_input,
)
from torch._inductor.cudagraph_utils import log_cudagraph_skip_and_bump_counter

from .. import openreg
from .dynamo import Interface


def _is_tensor(value):
    return isinstance(value, torch.Tensor)


class _Step:
    """The calls of one thread, on one stream, with inputs of the same sizes.

    The first one runs, and shows where the inputs are. The second one is captured. From then on an
    input that is where it was is read there, and one that is not is copied to a place of its own:
    the graph is captured anew when an input moves for the first time. Outputs are copied out of
    the graph's memory, which the next replay writes.
    """

    def __init__(self, call, device, mutated):
        self.call, self.device, self.mutated = call, device, mutated
        self.addresses = self.graph = None
        self.copies = {}
        self.refused = False

    def __call__(self, args):
        if self.refused:
            return self.call(args)
        addresses = [a.data_ptr() if _is_tensor(a) else a for a in args]
        if self.addresses is None:
            self.addresses = addresses
        elif not (moved := self._moved(addresses)) & self.mutated:
            if self.graph is None or moved:
                self.copies |= {i: static_input(args[i]) for i in moved}
                self._capture(args)
            if self.graph is not None:
                return self._replay(args)
        return self.call(args)

    def _moved(self, addresses):
        differ = (i for i, was in enumerate(self.addresses) if was != addresses[i])
        return {i for i in differ if i not in self.copies}

    def _capture(self, args):
        """Into `graph`, which stays None where the capture is refused: no further call is tried."""
        self.graph = self.outputs = None
        graph, inputs = openreg.Graph(), [self.copies.get(i, a) for i, a in enumerate(args)]
        stream = openreg.Stream(self.device)
        try:
            with openreg.graph(graph, stream=stream, capture_error_mode="thread_local"):
                outputs = self.call(list(inputs))
        except RuntimeError as refusal:
            self.refused = True
            log_cudagraph_skip_and_bump_counter(f"skipping cudagraphs due to {refusal}")
            return
        self.graph, self.outputs = graph, [_output(output, inputs) for output in outputs]

    def _replay(self, args):
        for i, copy in self.copies.items():
            index_expanded_dims_and_copy_(copy, args[i], get_expanded_dims(copy))
        self.graph.replay()
        outputs = [output(args) for output in self.outputs]
        args.clear()  # as `call` does
        return outputs


def _output(written, inputs):
    """How a call's output comes of what the graph has written, and of the call's own inputs."""
    if not _is_tensor(written):
        return lambda args: written
    for i, given in enumerate(inputs):
        if _is_tensor(given) and torch._C._is_alias_of(given, written):
            size, stride = written.size(), written.stride()
            ahead = written.storage_offset() - given.storage_offset()
            return lambda args: args[i].as_strided(size, stride, args[i].storage_offset() + ahead)
    return lambda args: clone_preserve_strides(written)


def replayed(call, device, mutated, dynamic):
    """`call` of a module that Inductor has generated, by graphs where that can be. It goes on the
    current stream of `device`, and returns before it has run.

    Args:
        call: takes a list of inputs, which it empties.
        device: the index of the device on which all of it is.
        mutated: the indices of the inputs that it writes.
        dynamic: whether the sizes of inputs differ from call to call.
    """
    own = threading.local()

    def step_of(args):
        sizes = [a.size() if _is_tensor(a) else a for a in args] if dynamic else ()
        steps = own.__dict__.setdefault("steps", {})
        key = (Interface.get_raw_stream(device), *sizes)
        if key not in steps:
            on_host = any(_is_tensor(a) and a.device.type == "cpu" for a in args)  # read by `call`
            steps[key] = call if on_host else _Step(call, device, mutated)
        return steps[key]

    def run(args):
        return call(args) if openreg.is_current_stream_capturing() else step_of(args)(args)

    return run
