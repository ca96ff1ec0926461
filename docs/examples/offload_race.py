"""A race of diffusers' group offloading to disk, without diffusers. `--mended` waits as its
offloading to memory does.

A stream of its own brings each layer's weights in, and they are dropped as soon as the product that
reads them has been queued. Their memory belongs to the loading stream, so the next weights are
copied over them while the computing stream may still read them. `ModuleGroup._offload_to_disk` of
diffusers 0.40 neither waits for the computing stream nor calls `record_stream()`.
"""

import sys

import torch

LAYERS = [torch.full((64, 64), float(i)) for i in (1, 2, 3, 4)]  # their product is 24


def product(mended):
    compute = torch.openreg.current_stream()
    load = torch.openreg.Stream()
    y = torch.ones(64, 64, device="openreg")
    torch.openreg._sleep(20_000_000)  # the device is behind the host, as with large layers
    for layer in LAYERS:
        with load:
            weights = layer.pin_memory().to("openreg", non_blocking=True)
        load.synchronize()
        y = y * weights
        if mended:
            compute.synchronize()
        del weights
    return y[0, 0].item()


with torch.openreg.sanitizer.enable("warn"):
    result = product("--mended" in sys.argv)
print("product:", "right" if result == 24 else f"{result:g} instead of 24")
print("races reported:", len(torch.openreg.sanitizer.reports()))
