"""mode="reduce-overhead": what a compiled graph queues is captured once, and replayed."""

import contextlib
import threading
import weakref

import torch
from torch._C._dynamo.guards import _reinterpret_tensor
from torch._dynamo import graph_bytecode_inputs
from torch._inductor import cudagraph_trees
from torch._inductor.compile_fx import (
    get_expanded_dims,
    index_expanded_dims_and_copy_,
    static_input,
)
from torch._inductor.cudagraph_utils import log_cudagraph_skip_and_bump_counter

from .. import _C, openreg
from .dynamo import Interface

_capturing = threading.Lock()  # a capture synchronises the device, which would end another one


def _is_tensor(value):
    return isinstance(value, torch.Tensor)


class Order:
    """The program's streams and events that a compiled graph uses.

    The generated code finds them by their indices in Dynamo's registry, where the program's own
    are: its current stream is not the stream that captures. A capture puts others in their place,
    so that all that the graph queues is captured, and the program's stay out of the capture. A
    replay is one piece of work on the current stream: it comes after what the program's streams
    have queued and after the events that the graph waits for, and they come after it.

    Args:
        streams: the indices of the streams.
        waited: those of the events that the graph waits for.
        recorded: those of the events that it records.
    """

    def __init__(self, streams=frozenset(), waited=frozenset(), recorded=frozenset()):
        self.streams, self.waited, self.recorded = streams, waited, recorded

    def _others(self, current):
        streams = map(graph_bytecode_inputs.get_external_object_by_index, self.streams)
        return {stream for stream in streams if stream != current}

    @contextlib.contextmanager
    def captured(self, caller):
        """For the body of a capture. `caller` is the stream on which the program has called."""
        capturing = openreg.current_stream()
        instead = {caller: capturing}
        for stream in self._others(caller):
            instead[stream] = _another(stream.device, instead.values())
            # A stream that the graph forks to without a wait is part of the capture, too.
            instead[stream].wait_stream(capturing)
        find = graph_bytecode_inputs.get_external_object_by_index
        objects = {i: instead[find(i)] for i in self.streams}
        objects |= {i: openreg.Event() for i in self.waited | self.recorded}
        known = graph_bytecode_inputs.index_to_external_object_weakref
        before = {i: known[i] for i in objects}
        known.update({i: weakref.ref(o) for i, o in objects.items()})
        try:
            yield
        finally:
            known.update(before)

    @contextlib.contextmanager
    def replayed(self, device):
        """For a replay and the copies of its inputs and outputs. Gives the program's other streams,
        which may use the outputs without a wait."""
        current = openreg.current_stream(device)
        find, others = graph_bytecode_inputs.get_external_object_by_index, self._others(current)
        for stream in others:
            current.wait_stream(stream)
        for i in self.waited:
            find(i).wait(current)
        yield others
        for i in self.recorded:
            find(i).record(current)
        for stream in others:
            stream.wait_stream(current)


def _another(device, taken):
    """A stream that is none of those: streams come from a pool, in turn."""
    while (stream := openreg.Stream(device)) in taken:
        pass
    return stream


class _Step:
    """The calls of one thread, on one stream, with inputs of the same sizes.

    The first one runs, and shows where the inputs are. The second one is captured. From then on an
    input that is where it was is read there, and one that is not is copied to a place of its own:
    the graph is captured anew when an input moves for the first time. Outputs are copied out of
    the graph's memory, which the next replay writes.
    """

    def __init__(self, call, device, mutated, donated, order):
        self.call, self.device, self.mutated, self.donated = call, device, mutated, donated
        self.order = order
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
        with _capturing, openreg.device(self.device):
            openreg.synchronize()  # what has failed before is the caller's to know, and no refusal
            caller = openreg.current_stream()
            try:
                with (
                    openreg.graph(graph, stream=stream, capture_error_mode="thread_local"),
                    self.order.captured(caller),
                ):
                    written = self.call(list(inputs))
            except RuntimeError as refusal:
                self.refused = True
                log_cudagraph_skip_and_bump_counter(f"skipping cudagraphs due to {refusal}")
                return
        for i in self.donated & self.copies.keys():
            inputs[i] = None  # the copy may have been written, as any memory of the graph's
        self.graph, self.outputs = graph, _Outputs(written, inputs)

    def _replay(self, args):
        used = self.order.streams
        with self.order.replayed(self.device) if used else contextlib.nullcontext(()) as others:
            for i, copy in self.copies.items():
                index_expanded_dims_and_copy_(copy, args[i], get_expanded_dims(copy))
            self.graph.replay()
            outputs = self.outputs(args)
            for tensor in filter(_is_tensor, outputs if others else ()):
                for stream in others:
                    tensor.record_stream(stream)
        args.clear()  # as `call` does
        return outputs


def _storage_of(tensor):
    return tensor.untyped_storage()._cdata


def _begin(tensor):
    return tensor.storage_offset() * tensor.itemsize


def _of_type(dtype, tensor):
    if tensor.dtype == dtype:
        return tensor
    return torch.empty(0, dtype=dtype, device=tensor.device).set_(tensor.untyped_storage())


class _Outputs:
    """How a call's outputs come of its own inputs, and of copies of what the graph has written.

    Those that share memory in the graph do so in each call, and those that are one tensor are one.
    To autograd none is a view, which could not be written in place.
    """

    def __init__(self, written, inputs):
        self.wholes, self.made, self.order = {}, [], []
        known = {}
        for value in written:
            if id(value) not in known:
                known[id(value)] = len(self.made)
                self.made.append(self._how(value, inputs))
            self.order.append(known[id(value)])

    def _how(self, value, inputs):
        if not _is_tensor(value):
            return lambda args, copies: value
        for i, given in enumerate(inputs):
            if given is value:
                return lambda args, copies: args[i]
        dtype, begin = value.dtype, _begin(value)
        size, stride = tuple(value.size()), value.stride()
        conj, neg = value.is_conj(), value.is_neg()

        def part(tensor, begin):
            typed = _of_type(dtype, tensor)
            ahead = begin // dtype.itemsize - typed.storage_offset()
            made = _reinterpret_tensor(typed, size, stride, ahead)
            torch._C._set_conj(made, conj)
            torch._C._set_neg(made, neg)
            return made

        for i, given in enumerate(inputs):
            if _is_tensor(given) and torch._C._is_alias_of(given, value):
                begin -= _begin(given)
                return lambda args, copies: part(args[i], _begin(args[i]) + begin)
        key = _storage_of(value)
        if key not in self.wholes:
            empty = torch.empty(0, dtype=dtype, device=value.device)
            self.wholes[key] = empty.set_(value.untyped_storage())
        return lambda args, copies: part(copies[key], begin)

    def __call__(self, args):
        copies = {key: whole.clone() for key, whole in self.wholes.items()}
        made = [how(args, copies) for how in self.made]
        return [made[i] for i in self.order]


_all = weakref.WeakSet()  # Inductor keeps the modules, after a reset too


class Replayed:
    """`call` of a module that Inductor has generated, by graphs where that can be. It goes on the
    current stream of `device`, and returns before it has run.

    Args:
        call: takes a list of inputs, which it empties.
        device: the index of the device on which all of it is.
        mutated: the indices of the inputs that it writes.
        donated: the indices of those that it may use as it does memory of its own.
        dynamic: whether the sizes of inputs differ from call to call.
        order: the program's streams and events that it uses.
    """

    def __init__(self, call, device, mutated, donated, dynamic, order):
        self.call, self.device, self.mutated, self.donated = call, device, mutated, donated
        self.dynamic, self.order, self.own = dynamic, order, threading.local()
        _all.add(self)

    def _step_of(self, args):
        sizes = [a.size() if _is_tensor(a) else a for a in args] if self.dynamic else ()
        steps = self.own.__dict__.setdefault("steps", {})
        # The sanitizer is told what a replay touches if it was on in the capture.
        key = (Interface.get_raw_stream(self.device), _C._sanitizer_active(), *sizes)
        if key not in steps:
            steps[key] = _Step(self.call, self.device, self.mutated, self.donated, self.order)
        return steps[key]

    def __call__(self, args):
        capturing = openreg.is_current_stream_capturing()
        return (self.call if capturing else self._step_of(args))(args)


def _and_ours(reset):
    """Inductor's `reset_cudagraph_trees`, which torch.compiler.reset() calls."""

    def reset_ours():
        for function in list(_all):
            function.own = threading.local()  # a thread that is in a step goes on with it
        reset()

    return reset_ours


cudagraph_trees.reset_cudagraph_trees = _and_ours(cudagraph_trees.reset_cudagraph_trees)
