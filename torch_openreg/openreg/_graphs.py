"""Graphs: not there yet. Their names are, and say so."""


def is_current_stream_capturing():
    """Whether the current stream's work is being recorded into a graph: False, as there are no
    graphs."""
    return False


_REFUSAL = "graphs are not implemented for openreg devices: run eagerly"


class graph:
    """Raises NotImplementedError, whatever `args` and `kwargs` are: there are no graphs."""

    def __init__(self, *args, **kwargs):
        raise NotImplementedError(_REFUSAL)


def make_graphed_callables(*args, **kwargs):
    """Raises NotImplementedError, whatever `args` and `kwargs` are: there are no graphs."""
    raise NotImplementedError(_REFUSAL)
