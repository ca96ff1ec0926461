"""Graphs: not there yet. Their names are, and say so."""


def is_current_stream_capturing():
    """Whether work is being recorded into a graph: never, there are no graphs."""
    return False


def _refuse(*args, **kwargs):
    """Raises NotImplementedError: there are no graphs."""
    raise NotImplementedError("graphs are not implemented for openreg devices: run eagerly")


class graph:
    """Raises NotImplementedError: there are no graphs."""

    __init__ = _refuse


graph_pool_handle = make_graphed_callables = _refuse
