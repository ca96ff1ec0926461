"""``python -m torch_openreg check-plugin``: a conformance suite for a device plugin.

`checks` runs in a process for each check. It needs Python and the C library alone, so the package
is imported there by itself, without PyTorch: a check takes milliseconds. `operators` has the checks
that need PyTorch, and `torchcts` the one by TorchCTS. `command` starts the processes and writes the
report.
"""
