"""Compiled backward passes that use side streams."""

from torch._dynamo.graph_bytecode_inputs import get_external_object_by_index

from .. import openreg


class Joined:
    """Wraps `call` of a backward pass. Autograd orders it with the current stream alone. The other
    streams that it uses come after the work queued there, and the current stream after theirs.

    Args:
        call: as Inductor generates it.
        streams: the indices of the streams in Dynamo's registry.
    """

    def __init__(self, call, streams):
        self.call, self.streams = call, streams

    def __call__(self, args):
        streams = [get_external_object_by_index(index) for index in self.streams]
        pairs = [(stream, openreg.current_stream(stream.device)) for stream in streams]
        for stream, current in pairs:
            stream.wait_stream(current)
        outputs = self.call(args)
        for stream, current in pairs:
            current.wait_stream(stream)
        return outputs
