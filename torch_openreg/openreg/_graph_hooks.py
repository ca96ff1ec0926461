"""Functions that are called at the moments of a graph's life, as PyTorch 2.14 has them for CUDA's.

Part of ``torch.openreg.graphs``, which has the names.
"""

import itertools
import warnings
import weakref
from collections import OrderedDict

from torch.utils.hooks import RemovableHandle

from .streams import current_stream

_MOMENTS = ("capture_start", "capture_end", "instantiate", "replay_start", "replay_end", "destroy")
EVERY = {moment: OrderedDict() for moment in _MOMENTS}  # for every graph
_numbers = itertools.count(1)


def _add(entries, entry):
    handle = RemovableHandle(entries)
    entries[handle.id] = entry
    return handle


def _call(hook, *arguments):
    """An error of one hook stops neither the graph nor the other hooks, as in CUDA."""
    try:
        hook(*arguments)
    except Exception as error:
        warnings.warn(f"a hook of graphs raised {type(error).__name__}: {error}", stacklevel=4)


def register_graph_capture_start_hook(fn):
    """Calls ``fn(graph)`` when a capture of any graph has begun. What `fn` queues on the stream is
    captured too. Returns a handle whose ``remove()`` ends this; so do the other functions."""
    return _add(EVERY["capture_start"], fn)


def register_graph_capture_end_hook(fn):
    """Calls ``fn(graph)`` when a capture of any graph has ended."""
    return _add(EVERY["capture_end"], fn)


def register_graph_instantiate_hook(fn):
    """Calls ``fn(graph)`` when any graph has been instantiated: after the capture, or with
    ``keep_graph=True`` by ``instantiate()`` or the first replay. `fn` may read ``graph.exec_id``,
    which `register_graph_destroy_hook` passes on."""
    return _add(EVERY["instantiate"], fn)


def register_graph_replay_start_hook(fn):
    """Calls ``fn(graph)`` before each replay of any graph is queued."""
    return _add(EVERY["replay_start"], fn)


def register_graph_replay_end_hook(fn):
    """Calls ``fn(graph)`` when a replay of any graph has been queued, or was refused."""
    return _add(EVERY["replay_end"], fn)


def register_graph_destroy_hook(fn):
    """Calls ``fn(exec_ids)`` when any graph that was captured is reset or released, with the set of
    the ``exec_id`` that it has had. `fn` does not get the graph, which may be gone."""
    return _add(EVERY["destroy"], fn)


def export_dot(path, *, verbose=True):
    """A hook for ``Graph.register_capture_end_hook`` that writes the graph with ``debug_dump``.

    Args:
        path: of the file in DOT; the picture is beside it.
        verbose: ignored: there is one form.
    """

    def hook(graph):
        graph.enable_debug_mode()
        graph.debug_dump(path)

    return hook


class _Retained:
    """What ends with one capture of a graph. It does not refer to the graph, which it would keep
    alive."""

    def __init__(self):
        self.callbacks, self.objects = OrderedDict(), OrderedDict()
        self.exec_ids = set()
        self.streams = None  # a set of those of the replays, once a caller wants them waited for

    def release(self):
        for stream in self.streams or ():
            stream.synchronize()
        for callback in list(self.callbacks.values()):
            _call(callback)
        for hook in list(EVERY["destroy"].values()):
            _call(hook, self.exec_ids)
        self.callbacks.clear()
        self.objects.clear()


class HookedGraph:
    """The hooks of one graph. A base of ``torch.openreg.Graph``, which calls run()."""

    exec_id = None
    """A number of this process for each instantiated graph, or None."""
    _own = None  # {moment: hooks}, once there is one
    _retained = None

    def register_capture_start_hook(self, hook):
        """Calls ``hook(graph)`` when this graph's capture has begun. Returns a handle whose
        ``remove()`` ends this. Other than with `register_graph_capture_start_hook`, and this is
        the same for the other moments, what `hook` raises is the call's exception."""
        return self._register("capture_start", hook)

    def register_capture_end_hook(self, hook):
        """Calls ``hook(graph)`` when this graph's capture has ended."""
        return self._register("capture_end", hook)

    def register_post_instantiate_hook(self, hook):
        """Calls ``hook(graph)`` when this graph has been instantiated."""
        return self._register("instantiate", hook)

    def register_replay_start_hook(self, hook):
        """Calls ``hook(graph)`` before each replay of this graph."""
        return self._register("replay_start", hook)

    def register_replay_end_hook(self, hook):
        """Calls ``hook(graph)`` when a replay of this graph has been queued, or was refused."""
        return self._register("replay_end", hook)

    def register_destroy_callback(self, cb, *, synchronize_before_release=False):
        """Calls ``cb()`` when this capture is released, by ``reset()`` or with the graph.

        Args:
            cb: must not refer to the graph, which it would keep alive.
            synchronize_before_release: whether to wait first for the streams of the replays.
        """
        return _add(self._of_capture(synchronize_before_release).callbacks, cb)

    def retain_object(self, obj, *, synchronize_before_release=False):
        """Keeps an object alive until this capture is released.

        Args:
            obj: must not refer to the graph, which it would keep alive.
            synchronize_before_release: whether to wait first for the streams of the replays.
        """
        return _add(self._of_capture(synchronize_before_release).objects, obj)

    def _register(self, moment, hook):
        if self._own is None:
            self._own = {moment: OrderedDict() for moment in _MOMENTS}
        return _add(self._own[moment], hook)

    def run(self, moment):
        for hook in list(EVERY[moment].values()):
            _call(hook, self)
        if self._own is not None:
            for hook in list(self._own[moment].values()):
                hook(self)

    def _of_capture(self, synchronizes=False):
        if self._retained is None:
            self._retained = _Retained()
            self._finalizer = weakref.finalize(self, self._retained.release)
        if synchronizes and self._retained.streams is None:
            self._retained.streams = set()
        return self._retained

    def _instantiated(self):
        self.exec_id = next(_numbers)
        self._of_capture().exec_ids.add(self.exec_id)
        self.run("instantiate")

    def _replays(self):
        if self._retained is not None and self._retained.streams is not None:
            self._retained.streams.add(current_stream())

    def _release(self):
        if self._retained is not None:
            self._finalizer()
            self._retained = self.exec_id = None
