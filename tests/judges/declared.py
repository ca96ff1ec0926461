"""What fails of TorchCTS's tests on this device, and why: {reason: patterns of tests}.

A pattern names tests as pytest does, from the suite's folder on; `*` stands for anything. One that
matches no test that fails is stale, and an error.
"""

DECLARED = {
    "named tensors, which PyTorch 2.13 no longer has on any device": (
        "rng/test_generator.py::test_rand_named_factory_metadata",
        "rng/test_generator.py::test_rand_generator_named_factory_metadata",
    ),
    "gives scales and zero points on the CPU for a tensor of the device, which the wrapper that "
    "PyTorch generates for CUDA's kernels refuses in the same words": (
        "dtypes/test_native_quantization.py::test_make_per_channel_quantized_tensor",
        "dtypes/test_native_quantization.py::test_make_quantized_out_and_empty_quantized",
        "dtypes/test_native_quantization.py::test_quantize_out_variants",
        "dtypes/test_native_quantization.py::test_quantize_per_channel",
        "dtypes/test_native_quantization.py::test_quantized_per_channel_qparams_out",
    ),
    "asks for `guard_allocator_enabled()` in the device's module, a function that no device of "
    "PyTorch has": ("memory/test_guard_alloc.py::test_guard_alloc_canary*",),
    "compares the noise that `rrelu` leaves unwritten in evaluation, made by `torch.empty_like`": (
        "rng/test_dropout_rrelu_variants.py::test_rrelu_train_false_variants",
    ),
    "expects a copy to the CPU to have the strides of a view with gaps, which only a CPU tensor, "
    "of which `cpu()` is the tensor itself, has": (
        "strides/test_noncontiguous.py::test_stride_and_storage_offset_metadata",
    ),
}
