"""torch.compile on this device: what Dynamo and Inductor ask of a device, and how Inductor's C++
kernels are queued. Nothing in here is imported before someone compiles, or calls flex attention.
docs/compile.md has the hooks that are used."""
