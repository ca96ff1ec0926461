"""Graphs: a stream's work, captured once and replayed again and again.

::

    graph = torch.openreg.Graph()
    with torch.openreg.graph(graph):
        y = model(x)          # captured, not run
    x.copy_(batch)            # the same memory, with other values
    graph.replay()            # y has what the model makes of it

docs/graphs.md lists what can be captured, and the errors.
"""

import functools
import gc
import inspect
import types

import torch
import torch.cuda.graphs

from .. import _C
from ._graph_hooks import EVERY, HookedGraph
from ._graph_hooks import export_dot as export_dot
from ._graph_hooks import register_graph_capture_end_hook as register_graph_capture_end_hook
from ._graph_hooks import register_graph_capture_start_hook as register_graph_capture_start_hook
from ._graph_hooks import register_graph_destroy_hook as register_graph_destroy_hook
from ._graph_hooks import register_graph_instantiate_hook as register_graph_instantiate_hook
from ._graph_hooks import register_graph_replay_end_hook as register_graph_replay_end_hook
from ._graph_hooks import register_graph_replay_start_hook as register_graph_replay_start_hook
from ._input_liveness import InputLiveness
from ._mempool import graph_pool_handle
from ._utils import OWN_NAME, borrowed, type_name
from .device import current_device, synchronize
from .memory import empty_cache, memory_snapshot
from .streams import Stream, stream

__all__ = [
    "Graph",
    "graph",
    "graph_pool_handle",
    "is_current_stream_capturing",
    "make_graphed_callables",
]
if hasattr(torch.cuda, "export_dot"):  # PyTorch 2.14: before it, a name of torch.openreg.graphs
    __all__ += ["export_dot"]


# Read here, because under as_cuda() the names are this file's. Their arguments depend on PyTorch's
# version.
_THEIRS = torch.cuda.graphs.make_graphed_callables
_SIGNATURE = inspect.signature(torch.cuda.graphs.graph)


def is_current_stream_capturing():
    """Whether the current stream's work is being captured into a graph. Does not use a device."""
    return _C._is_current_stream_capturing()


class Graph(HookedGraph, torch.accelerator.Graph):
    """``torch.accelerator.Graph``, whose ``capture_begin`` accepts the arguments of
    ``torch.cuda.CUDAGraph``'s.

    Args:
        keep_graph: the graph is instantiated by ``instantiate`` or the first ``replay``, not by
            ``capture_end``. There is nothing to instantiate here, so only hooks see the difference.
        pool: as of ``capture_begin``.
        capture_error_mode: as of ``capture_begin``.
    """

    _followers = ()  # of the capture, from its begin to stop(); each has a check of a replay
    _pending = False  # captured, and not instantiated

    def __init__(self, keep_graph=False, *, pool=None, capture_error_mode="default"):
        super().__init__(keep_graph, pool=pool, capture_error_mode=capture_error_mode)
        self._keep_graph = keep_graph

    def capture_begin(self, pool=None, capture_error_mode=None, check_input_liveness=False):
        """Begins to capture what is queued on the current stream, by any thread.

        Args:
            pool: the memory pool to allocate from, as ``graph_pool_handle()`` or another graph's
                ``pool()`` gives it; None is the constructor's, or else one of its own.
            capture_error_mode: "default", "global", "thread_local" or "relaxed"; None is the
                constructor's. "global" and "thread_local": the thread that begins the capture ends
                it. docs/graphs.md has what else other threads may do.
            check_input_liveness: True follows the operators of the capture: ``replay`` raises
                RuntimeError if a tensor that they use, and that was made before, has been freed.
                The sanitizer reports that without it, for compiled kernels too.

        Raises RuntimeError on a default stream, or one that is capturing.
        """
        self._forget()
        super(torch.accelerator.Graph, self).capture_begin(
            pool=self.graph_pool if pool is None else pool,
            capture_error_mode=capture_error_mode or self.capture_error_mode,
        )
        followers = []
        if check_input_liveness:
            followers.append(InputLiveness())
        if _C._sanitizer_active():
            from .sanitizer._first_calls import FirstCalls

            followers.append(FirstCalls())
        self._followers = tuple(followers)
        self.run("capture_start")

    def capture_end(self):
        """Ends the capture, on the stream on which it began."""
        self._followers = tuple(follower for follower in self._followers if follower.stop())
        super(torch.accelerator.Graph, self).capture_end()
        self.run("capture_end")
        self._pending = True
        if not self._keep_graph:
            self.instantiate()

    def instantiate(self):
        """Only calls the hooks. ``capture_end`` or the first ``replay`` calls it."""
        super(torch.accelerator.Graph, self).instantiate()
        self._pending = False
        self._instantiated()

    def replay(self):
        """Queues the captured work on the current stream."""
        for follower in self._followers:
            follower.check()
        if self._pending:
            self.instantiate()
        if self._own is None and not EVERY["replay_start"] and not EVERY["replay_end"]:
            self._replays()
            super(torch.accelerator.Graph, self).replay()
            return
        self.run("replay_start")
        try:
            self._replays()
            super(torch.accelerator.Graph, self).replay()
        finally:
            self.run("replay_end")

    def reset(self):
        """Releases what was captured, so that the graph can be captured again."""
        self._forget()
        self._pending = False
        self._release()
        super(torch.accelerator.Graph, self).reset()

    def _forget(self):
        followers, self._followers = self._followers, ()
        for follower in followers:
            follower.stop()

    def register_generator_state(self, generator):
        """Does nothing; it exists for programs written for ``torch.cuda.CUDAGraph``. `generator`
        becomes the graph's when a capture draws from it."""


_capture_stream = functools.cache(Stream)


class graph:
    """A context that captures what is queued in it, on a stream of its own. After an exception
    the graph is as before, and can be captured again.

    It synchronises the current device and empties the allocator's cache first, as
    ``torch.cuda.graph`` does. `args` and `kwargs` are those of that one, in the PyTorch at hand.

    Args:
        cuda_graph: the graph to fill.
        pool: as of ``Graph.capture_begin``.
        stream: to capture on; None is one of the device that is current when the context is
            made, which its captures share.
        capture_error_mode: as of ``Graph.capture_begin``.
        enable_annotations: True raises NotImplementedError.
        annotation_config: from PyTorch 2.15 on, for annotations alone.
        check_input_liveness: as of ``Graph.capture_begin``.
    """

    default_capture_stream = None  # of all devices' captures, for programs that set it
    __signature__ = _SIGNATURE

    def __init__(self, *args, **kwargs):
        given = _SIGNATURE.bind(*args, **kwargs)
        given.apply_defaults()
        given = types.SimpleNamespace(**given.arguments)
        if given.enable_annotations:
            raise NotImplementedError(
                "enable_annotations=True: they are for NVIDIA's tools, "
                f"which see no {OWN_NAME} graph\n"
                "  help: debug_dump draws one"
            )
        if given.stream is None:
            given.stream = self.default_capture_stream or _capture_stream(current_device())
        self.cuda_graph = given.cuda_graph
        self.pool = given.pool
        self.capture_stream = given.stream
        self.capture_error_mode = given.capture_error_mode
        self.check_input_liveness = given.check_input_liveness

    def __enter__(self):
        synchronize()
        if torch.compiler.config.force_cudagraph_gc:
            gc.collect()
        empty_cache()
        self._stream = stream(self.capture_stream)
        self._stream.__enter__()
        try:
            self.cuda_graph.capture_begin(
                self.pool, self.capture_error_mode, self.check_input_liveness
            )
        except BaseException:
            self._stream.__exit__(None, None, None)
            raise

    def __exit__(self, *exception):
        try:
            if exception[0] is None:
                self.cuda_graph.capture_end()
            else:  # an incomplete step is no graph
                self.cuda_graph.reset()
        except BaseException:
            self.cuda_graph.reset()  # the capture goes on if another stream is current
            raise
        finally:
            self._stream.__exit__(*exception)


class _Pass(graph):
    """The capture of a pass of a graphed callable."""

    def __exit__(self, *exception):
        if _C._sanitizer_active():
            self.cuda_graph.reads = frozenset(_C._graph_reads())
        return super().__exit__(*exception)


def _needs_its_call(forward, backward, inputs):
    """Whether the backward pass reads what each call writes: its arguments, or what it saved in the
    graph's pool."""
    known = inspect.getclosurevars(forward).nonlocals
    if "fwd_graph" in known:  # before PyTorch 2.15
        known |= inspect.getclosurevars(inspect.unwrap(backward)).nonlocals
        forward_graph, backward_graph = known["fwd_graph"], known["bwd_graph"]
    else:
        forward_graph, backward_graph = inputs[0]
    reads = getattr(backward_graph, "reads", ())
    if not reads:
        return False
    arguments = known["static_input_surface"][: known["len_user_args"]]
    if any(argument.untyped_storage().data_ptr() in reads for argument in arguments):
        return True
    saved = memory_snapshot(forward_graph.pool())
    return any(0 <= read - s["address"] < s["total_size"] for read in reads for s in saved)


class _Function(torch.autograd.Function):
    """The base of a graphed callable. The sanitizer tells its calls apart, though all of them write
    the same memory."""

    def __init_subclass__(cls):
        super().__init_subclass__()
        forward, backward, outputs = cls.forward, cls.backward, _C._GraphOutputs()
        needs = None

        def call(ctx, *inputs):
            nonlocal needs
            made = forward(ctx, *inputs)
            if _C._sanitizer_active():
                if needs is None:
                    needs = _needs_its_call(forward, backward, inputs)
                made, ctx.call = tuple(outputs.add(made)), outputs.count
            return made

        def call_backward(ctx, *gradients):
            if needs and _C._sanitizer_active() and hasattr(ctx, "call"):
                outputs.backward(ctx.call)
            return backward(ctx, *gradients)

        cls.forward, cls.backward = staticmethod(call), staticmethod(call_backward)


class _Torch:
    """``torch``, as it appears to a function of ``torch.cuda.graphs``."""

    def __init__(self):
        self.cuda = types.SimpleNamespace(
            CUDAGraph=Graph, graph=_Pass, stream=stream, Stream=Stream, synchronize=synchronize
        )
        self.autograd = types.SimpleNamespace(
            Function=_Function, function=torch.autograd.function, grad=torch.autograd.grad
        )

    def is_autocast_enabled(self):
        return torch.is_autocast_enabled(type_name())

    def __getattr__(self, name):
        return getattr(torch, name)


@functools.wraps(_THEIRS, assigned=())  # its signature
def make_graphed_callables(*args, **kwargs):
    """PyTorch's own ``torch.cuda.make_graphed_callables``, for this device: functions or modules
    whose forward and backward are graphs.

    Args:
        callables: a function or module, or a tuple of them in the order in which they will run.
        sample_args: the tuple of its arguments, or a tuple of such tuples.
        num_warmup_iters: how often each runs before it is captured.
        allow_unused_input: whether an argument may be unused.
        pool: as of ``Graph.capture_begin``.
        capture_error_mode: as of ``Graph.capture_begin``. From PyTorch 2.14 on, as the next one.
        enable_annotations: True raises NotImplementedError.

    `args` and `kwargs` are those of PyTorch's own, in the version at hand. Raises AssertionError
    and RuntimeError for what cannot be made a graph, as that one does: a module with hooks, for
    example, or under autocast with its cache.

    It synchronises the device. What is returned is asynchronous, on the current stream.
    """
    make = borrowed(_THEIRS, torch=_Torch(), graph_pool_handle=graph_pool_handle)
    return make(*args, **kwargs)
