"""mode="reduce-overhead": captures once what a compiled graph queues, and replays it."""

import contextlib
import threading
import weakref

import torch
from torch._C._dynamo.guards import _reinterpret_tensor
from torch._dynamo import graph_bytecode_inputs
from torch._dynamo.callback import callback_handler
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

    The generated code finds them by their indices in Dynamo's registry, which holds the program's
    own: its current stream is not the capturing one. A capture puts others in their place, so that
    everything that the graph queues is captured, and the program's stay out of the capture. A
    replay is one unit of work on the current stream: it comes after what the program's streams
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
    def captured(self, caller, pool):
        """For the body of a capture into `pool`. `caller` is the stream that was current at the
        program's call."""
        capturing = openreg.current_stream()
        instead = {caller: capturing}
        for stream in self._others(caller):
            instead[stream] = pool.stream(stream.device, instead.values())
            # A stream that the graph forks to without a wait is part of the capture, too.
            instead[stream].wait_stream(capturing)
        find = graph_bytecode_inputs.get_external_object_by_index
        objects = {i: instead[find(i)] for i in self.streams}
        objects |= {i: openreg.Event() for i in self.waited | self.recorded}
        known = graph_bytecode_inputs.index_to_external_object_weakref
        before = {i: known[i] for i in objects}
        for i, o in objects.items():
            known[i] = weakref.ref(o)  # a dictionary, from 2.15 on a list
        try:
            yield
        finally:
            for i, reference in before.items():
                known[i] = reference

    @contextlib.contextmanager
    def replayed(self, device):
        """For a replay and the copies of its inputs and outputs. Returns the program's other
        streams, which may use the outputs without a wait."""
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


class _Pool(_C._ReplayPool):
    """The memory of graphs that one thread replays on one stream.

    A replay begins with copies into the pool and ends with copies out of it, in the stream's order.
    So between two replays nothing there is in use, and each capture uses the same memory as the
    others. No tensor owns any: where memory is short, another thread drops all the graphs.
    """

    def __init__(self, device):
        super().__init__(device)
        self.id, self.streams = openreg.graph_pool_handle(), []

    def stream(self, device, taken):
        """Returns the stream to capture on, which is not in `taken`. Always the same ones, because
        memory that a stream has freed is reused by that stream alone."""
        for stream in self.streams:
            if stream.device == device and stream not in taken:
                return stream
        while (stream := openreg.Stream(device)) in taken:  # they come in turn
            pass
        self.streams.append(stream)
        return stream

    def segments(self):
        return openreg.memory.memory_snapshot(self.id)


def _without_owner(tensor, segments):
    """Returns `tensor`, whose memory is free for other captures if it lies in a pool's segments.

    Other memory stays the tensor's: that of a constant, for example.
    """
    storage = tensor.untyped_storage()
    start = storage.data_ptr()
    if not any(0 <= start - s["address"] < s["total_size"] for s in segments):
        return tensor
    bare = torch._C._construct_storage_from_data_pointer(start, tensor.device, storage.nbytes())
    empty = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    return empty.set_(bare, tensor.storage_offset(), tensor.size(), tensor.stride())


class _Step:
    """The calls of one thread, on one stream, with inputs of the same sizes.

    The first call runs, and shows where the inputs are. The second one is captured. From then on an
    input is read in its place, or copied to a place of its own if its address has changed. The
    graph is captured again when an input moves for the first time, or when it has been dropped.
    Outputs are copied out of the graph's memory, which the next replay of the pool writes.
    """

    def __init__(self, call, device, mutated, donated, order, pools, stream):
        self.call, self.device, self.mutated, self.donated = call, device, mutated, donated
        self.order, self.pools, self.stream = order, pools, stream
        self.addresses = self.pool = self.graph = None
        self.drops, self.moving = 0, set()
        self.was_short = self.refused = False

    def __call__(self, args):
        outputs = None
        if not self.refused and self._find_pool().hold():
            try:
                outputs = self._replay(args) if self._is_ready(args) else None
            finally:
                self.pool.let_go()
        return self.call(args) if outputs is None else outputs

    def _find_pool(self):
        """The pool of the graph, or of the next one to be captured."""
        if not self._has_graph():
            if self.stream not in self.pools:
                self.pools[self.stream] = _Pool(self.device)
            self.pool = self.pools[self.stream]
        return self.pool

    def _has_graph(self):
        return self.graph is not None and self.drops == self.pool.drops

    def _is_ready(self, args):
        """Whether there is a graph for these inputs. Captures one where necessary."""
        addresses = [a.data_ptr() if _is_tensor(a) else a for a in args]
        if self.addresses is None:
            self.addresses = addresses
            return False
        moved = self._moved(addresses)
        if moved & self.mutated:
            return False
        if moved or not self._has_graph():
            self.moving |= moved
            self._capture(args)
        return self.graph is not None

    def _moved(self, addresses):
        differ = (i for i, was in enumerate(self.addresses) if was != addresses[i])
        return {i for i in differ if i not in self.moving}

    def _capture(self, args):
        """Captures into `graph`, which stays None where the capture is refused: no further call is
        tried."""
        self.graph = self.outputs = self.copies = refusal = None
        graph, pool = openreg.Graph(), self.pool
        with _capturing, openreg.device(self.device):
            openreg.synchronize()  # an earlier failure goes to the caller, and is no refusal
            caller = openreg.current_stream()
            stream = pool.stream(caller.device, [caller])
            options = {"pool": pool.id, "stream": stream, "capture_error_mode": "thread_local"}
            try:
                with openreg.graph(graph, **options), self.order.captured(caller, pool):
                    copies = {i: static_input(args[i]) for i in self.moving}
                    inputs = [copies.get(i, a) for i, a in enumerate(args)]
                    written = self.call(list(inputs))
                    if _C._sanitizer_active():
                        _C._graph_inputs_checked()
            except RuntimeError as error:
                refusal = error.with_traceback(None)
        if refusal is None:
            for i in self.donated & copies.keys():
                inputs[i] = None  # the copy may have been written, as any memory of the graph's
            segments = pool.segments()
            self.outputs = _Outputs(written, inputs, segments)
            self.copies = {i: _without_owner(copy, segments) for i, copy in copies.items()}
        written = inputs = copies = None
        if any(s["allocated_size"] for s in pool.segments()):
            # The call has kept memory of the pool. Earlier graphs would write there.
            pool.drop()
            self.pools.pop(self.stream, None)
        if isinstance(refusal, torch.OutOfMemoryError):
            self._drop(refusal)
        elif refusal is not None:
            self._refuse(refusal)
        else:
            self.graph, self.drops = graph, pool.drops
            pool.add(graph)

    def _refuse(self, refusal):
        self.refused = True
        log_cudagraph_skip_and_bump_counter(f"skipping cudagraphs due to {refusal}")

    def _drop(self, refusal):
        """Drops the pool's graphs because memory is short: without them the call may have enough. A
        step that runs short of it again is not captured any more."""
        self.graph = None
        self.pool.drop()
        if self.was_short:
            self._refuse(refusal)
        self.was_short = True

    def _replay(self, args):
        try:
            made = self.outputs.allocate()  # before anything is queued that must not run twice
        except torch.OutOfMemoryError as refusal:
            return self._drop(refusal)
        used = self.order.streams
        with self.order.replayed(self.device) if used else contextlib.nullcontext(()) as others:
            for i, copy in self.copies.items():
                index_expanded_dims_and_copy_(copy, args[i], get_expanded_dims(copy))
            self.graph.replay()
            outputs = self.outputs(args, made)
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
    """Makes a call's outputs from its own inputs, and from copies of what the graph has written.

    Outputs that share memory in the graph share it in each call; one tensor stays one tensor. To
    autograd none is a view, because a view could not be written in place.
    """

    def __init__(self, written, inputs, segments):
        self.wholes, self.made, self.order = {}, [], []
        known = {}
        for value in written:
            if id(value) not in known:
                known[id(value)] = len(self.made)
                self.made.append(self._how(value, inputs))
            self.order.append(known[id(value)])
        self.wholes = {key: _without_owner(w, segments) for key, w in self.wholes.items()}

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

    def allocate(self):
        """Allocates memory for the copies."""
        return {key: torch.empty_like(whole) for key, whole in self.wholes.items()}

    def __call__(self, args, copies):
        for key, whole in self.wholes.items():
            copies[key].copy_(whole)
        made = [how(args, copies) for how in self.made]
        return [made[i] for i in self.order]


_all = weakref.WeakSet()  # Inductor keeps the modules, after a reset too
_until_reset = weakref.WeakSet()


def _drop_all():
    for function in list(_all):
        function.own = threading.local()  # a thread that is in a step keeps using it


def _drop_at_reset():
    """torch.compiler.reset() forgets the callbacks of compilations. This one does nothing but end
    then."""
    if _until_reset:
        return

    def forgotten(_):
        pass

    callback_handler.register_start_callback(forgotten)
    _until_reset.add(forgotten)
    weakref.finalize(forgotten, _drop_all).atexit = False


class Replayed:
    """Calls `call` of a module that Inductor has generated, through graphs where possible. It is
    queued on the current stream of `device`, and returns before it has run.

    Args:
        call: takes a list of inputs, which it empties.
        device: the index of its only device.
        mutated: the indices of the inputs that it writes.
        donated: the indices of those that it may use as its own memory.
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
        pools = self.own.__dict__.setdefault("pools", {})
        # The sanitizer is given a replay's accesses if it was on in the capture.
        stream = Interface.get_raw_stream(self.device)
        key = (stream, _C._sanitizer_active(), *sizes)
        if key not in steps:
            _drop_at_reset()
            given = self.call, self.device, self.mutated, self.donated, self.order
            steps[key] = _Step(*given, pools, stream)
        return steps[key]

    def __call__(self, args):
        capturing = openreg.is_current_stream_capturing()
        return (self.call if capturing else self._step_of(args))(args)
