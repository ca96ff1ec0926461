"""What fails of TorchCTS's tests on this device, and why: {reason: patterns of tests}.

A pattern names tests as pytest does, from the suite's folder on; `*` stands for anything. One that
matches no test that fails is stale, and an error.
"""

from torch_openreg._check_plugin import torchcts

# Written for kernels of an accelerator's own: on the CPU it returns before it compares.
CPU_TOO = (
    "leaves the CPU out, whose kernel it would find wrong: the device's numbers are the CPU's. "
)

DECLARED = {
    **torchcts.DECLARED,
    "named tensors, which PyTorch 2.13 no longer has on any device": (
        "operators/test_named_tensors.py::test_named_tensor_*",
        "generated/test_functional_variants.py::*.dimname*",
        "generated/test_functional_variants.py::*.names_dim*",
        "generated/test_inplace_variants.py::*.dimname*",
        "generated/test_inplace_variants.py::*.names_dim*",
        "generated/test_out_variants.py::*.names_*",
    ),
    CPU_TOO + "Of the magnitude of the least integer; of windows for a great beta, and of complex "
    "ones; of shapes near 0; of exponents above 32 bits; of the sign of zeros; of coordinates that "
    "are not finite; of `flip` for complex halves": (
        "operators/test_edge_contracts.py::test_compact_gcd_signed_minimum*",
        "operators/test_edge_contracts.py::test_complex32_flip_uses_raw_element_bits*",
        "operators/test_edge_contracts.py::test_igamma_tiny_shape_tails*",
        "operators/test_edge_contracts.py::test_kaiser_large_and_infinite_beta*",
        "operators/test_edge_contracts.py::test_ldexp_wide_int64_exponents*",
        "operators/test_edge_contracts.py::test_logit_backward_negative_zero*",
        "operators/test_edge_contracts.py::test_strided_extrema_preserve_first_signed_zero*",
        "operators/test_grid_sample_contract.py::test_r086_grid_sample_nonfinite_coordinate*",
    ),
    CPU_TOO + "`_saturate_weight_to_fp16` takes matrices of the form that FBGEMM has, and writes "
    "into them": ("operators/test_misc.py::test_saturate_weight_to_fp16*",),
    CPU_TOO + "The derivative of an embedding bag with `scale_grad_by_freq` takes the count of "
    "another index": (
        "autograd/test_backward.py::test_embedding_bag_scale_grad_by_frequency_contract",
    ),
    CPU_TOO + "Errors are PyTorch's for all devices: `vander` changes what its derivative needs, "
    "and `group_norm` has none for a bias without a weight": (
        "operators/test_linalg.py::test_public_vander_decreasing_backward*",
        "operators/test_norm.py::test_group_norm_bias_only_backward*",
    ),
    CPU_TOO + "`histc` counts in halves, for each thread: the CPU with one thread has the same": (
        "operators/test_edge_contracts.py::test_histc_casts_completed_integer_counts_once*",
    ),
    CPU_TOO + "`im2col` and `col2im` with `out=` of their own input: what is read after it was "
    "written depends on the order of threads": (
        "operators/test_edge_contracts.py::test_im2col_col2im_out_input_alias*",
    ),
    "compares memory that is not written; fails on the CPU, too": (
        "operators/test_misc.py::test_low_level_misc_dispatcher_helpers",
    ),
    "compares a sparse tensor whose indices `_sparse_compressed_tensor_with_dims` leaves "
    "unwritten, which also ends the process on the CPU": (
        "operators/test_sparse.py::test_sparse_low_level_compressed_generic_helpers",
    ),
    "compares a derivative with that of more bits: what overflows in between, or is rounded, gives "
    "NaN, infinities and other numbers, the same on the CPU and the device": (
        "opinfo/test_opinfo_backward.py::test_op_backward[_segment_reduce-torch.float16]",
        "opinfo/test_opinfo_backward.py::test_op_backward[grid_sampler_*d-torch.*float16]",
        "opinfo/test_opinfo_backward.py::test_op_backward[nn.functional.soft_margin_loss-"
        "torch.float16]",
        "opinfo/test_opinfo_backward.py::test_op_backward[renorm-torch.complex64]",
    ),
    "gives indices on the device to `tensor_split`, which PyTorch refuses for every device": (
        "opinfo/test_opinfo_backward.py::test_op_backward[tensor_split-*",
        "opinfo/test_opinfo_forward.py::test_op_forward[*-tensor_split-*",
    ),
    "asks for the real view of a derivative that is conjugated lazily, as the CPU's is": (
        "opinfo/test_opinfo_backward.py::test_op_backward[svd_lowrank-torch.complex*",
    ),
    "names no device: PyTorch's composite makes the sparse tensor on the CPU for every device": (
        "operators/test_sparse.py::test_sparse_low_level_constructor_overloads",
    ),
    "the CPU's fused kernel of SGD gives these numbers for 16-bit parameters": (
        "training/test_training_pipeline.py::test_fused_optimizer_pipelines[SGD-dtype1]",
        "training/test_training_pipeline.py::test_fused_optimizer_pipelines[SGD-dtype2]",
    ),
    "gives sequences in the place of heads to attention of nested tensors: PyTorch "
    "hands the values to plain attention for every device (`torch/nested/_internal/sdpa.py`)": (
        "workloads/test_sdpa.py::test_sdpa_nested_*",
    ),
    "kernels that only CUDA has by these names; the CPU's, and the device's, is "
    "`_scaled_dot_product_flash_attention_for_cpu`": (
        "generated/test_oracle_surfaces.py::test_oracle_surface[_efficient_attention_*",
        "generated/test_oracle_surfaces.py::test_oracle_surface[_flash_attention_*",
        "generated/test_oracle_surfaces.py::test_oracle_surface[_scaled_dot_product_eff*",
        "generated/test_oracle_surfaces.py::test_oracle_surface[_scaled_dot_product_flash*",
    ),
    "has kernels for nested tensors alone, or for meta tensors alone; on the CPU, too": (
        "generated/test_oracle_surfaces.py::test_oracle_surface[matmul_backward*",
        "generated/test_oracle_surfaces.py::test_oracle_surface[_resize_output*",
    ),
    "pins a tensor of the device, which PyTorch refuses for every device but the CPU": (
        "generated/test_oracle_surfaces.py::test_oracle_surface[_pin_memory*",
        "generated/test_oracle_surfaces.py::test_oracle_surface[pin_memory*",
    ),
    "PyTorch's composite refuses it outside of inference mode, on the CPU, too": (
        "generated/test_oracle_surfaces.py::test_oracle_surface[_fw_primal_copy.out*",
        "generated/test_oracle_surfaces.py::test_oracle_surface[_make_dual_copy.out*",
    ),
    "expects a workspace of a certain size, which is each backend's own: only its own derivative "
    "reads it": ("generated/test_oracle_surfaces.py::test_oracle_surface[_thnn_fused_gru_cell*",),
    "gives an empty tensor as the bias, where none is an undefined tensor, as autograd has it": (
        "generated/test_oracle_surfaces.py::test_oracle_surface"
        "[_scaled_dot_product_fused_attention_overrideable_backward*",
    ),
    "negates `uint16`, for which the CPU has no kernel: TorchCTS has a reference of its own": (
        "generated/test_view_aliases.py::test_generated_view_alias[_neg_view*",
    ),
}
