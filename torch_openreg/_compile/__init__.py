"""torch.compile on this device: what Dynamo and Inductor need of a device, and how Inductor's C++
kernels are queued. Nothing here is imported before the first compilation or call of flex attention.
docs/compile.md lists the hooks that are used."""
