"""Where a compiled backward pass gives back memory that another stream uses. Imported after
torch._functorch._aot_autograd.streams."""

from .._patches import wrap


def _of_tensors(populate, timelines, *args):
    """A stream's timeline without its records of events and waits.

    The memory is given back after the last node of the timeline if the other stream takes longer
    than all of them, on the stream of that node's device. A record or a wait has none: PyTorch
    fails with a KeyError.
    """
    timeline = populate(timelines, *args)
    if all("val" in node.meta for node in timeline):
        return timeline
    of_tensors = type(timeline)()
    of_tensors.update((node, at) for node, at in timeline.items() if "val" in node.meta)
    timelines.update((key, of_tensors) for key in timelines if timelines[key] is timeline)
    return of_tensors


wrap("torch._functorch._aot_autograd.streams.populate_stream_timeline", _of_tensors)
