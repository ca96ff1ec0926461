"""What fails on this device where native CPU passes, and why.

An entry names test functions as `file::Class::function`, or one operator or parameter of it as
`file::Class::function(variant)`; `*` stands for anything. Variants by dtype are never named. An
entry has to hold: one of whose tests none fails any more is stale, and an error.
"""

from support.declarations import Declared

BY_DATA = (
    "expects an error that data decides at the call; the test leaves CUDA out by its name, as its "
    "kernels cannot raise there either"
)
BY_NAME = "asks for the device's name, and expects of all others what CUDA does: "
RANDOM = (
    "the device's random numbers are not the CPU's; of these numbers one rounding is more than the "
    "test's tolerance, and the CPU given the same numbers gives the same bits"
)


def _of_inductor(tests):
    file = "inductor/test_torchinductor*.py::*CommonTemplate::"
    forms = ("", "_dynamic_shapes")
    return " ".join(file + test + form for test in tests.split() for form in forms)


DECLARED = (
    # ---- No backend outside of PyTorch's tree can meet them ----
    Declared(
        "nn/test_convolution.py::TestConvolutionNNDeviceType::test_conv_backend",
        "PyTorch chooses `_ConvBackend.Overrideable` for each PrivateUse1 device",
    ),
    Declared(
        "test_torch.py::TestTorchDeviceType::test_tensor_storage_type",
        "expects `torch.FloatStorage` and the like of every device but CUDA",
    ),
    Declared(
        "test_torch.py::TestTorchDeviceType::test_broadcast(fn_map*)",
        "`Tensor.map_` refuses all but the CPU before it asks the device",
    ),
    Declared(
        "nn/test_embedding.py::TestEmbeddingNNDeviceType::test_embedding_bag_out_of_bounds_idx "
        "test_torch.py::TestTorchDeviceType::test_masked_scatter "
        "test_indexing.py::NumpyTests::test_trivial_fancy_out_of_bounds "
        "test_nn.py::TestNNDeviceType::test_one_hot "
        "test_indexing.py::TestIndexing::test_advancedindex",
        BY_DATA,
    ),
    Declared(
        "test_indexing.py::NumpyTests::test_boolean_assignment_value_mismatch",
        "expects an error that data decides at the call: how many values a mask takes is known "
        "when its kernel runs, for which CUDA waits and this device does not",
    ),
    Declared(
        "test_sort_and_select.py::TestSortAndSelect::test_stable_sort_against_numpy",
        "fills a device tensor at indices of the CPU, which every device refuses; CUDA is left out",
    ),
    Declared(
        "test_sparse_csr.py::TestSparseCompressed::test_sparse_compressed_constructor",
        BY_NAME + "makes a tensor from lists, which is on the CPU, and expects it on the device",
    ),
    Declared(
        "test_nn.py::TestNNDeviceType::test_transformerencoderlayer",
        "asks whether a result is the CPU's or CUDA's, and expects that others go without the fast "
        "path of a transformer, which PyTorch gives to each PrivateUse1 device",
    ),
    Declared(
        "test_sparse.py::TestSparse::test_empty_like",
        "expects a text that names the CPU's or CUDA's keys of sparse tensors",
    ),
    Declared(
        "test_sparse_csr.py::TestSparseCompressed::test_print "
        "test_sparse.py::TestSparse::test_print_coalesced "
        "test_sparse.py::TestSparse::test_print_uncoalesced",
        "compares with a file of the device's name, of which PyTorch has two: the CPU's and CUDA's",
    ),
    Declared(
        "test_torch.py::TestTorchDeviceType::test_lazy_clone* "
        "test_torch.py::TestTorchDeviceType::test_parallel_cow_materialize_error "
        "test_ops.py::TestCompositeCompliance::test_cow_input",
        "expects a lazy clone to share its memory until the first write, which PyTorch orders "
        "after no stream; on this device it is a copy at once",
    ),
    Declared(
        "test_linalg.py::TestLinalg::test__int4_mm",
        BY_NAME + "operators for int4 weights that have no CPU kernel of that name",
    ),
    Declared(
        "test_linalg.py::TestLinalg::test_linalg_lstsq_input_checks",
        BY_NAME + "that only the driver gels is allowed",
    ),
    Declared(
        "test_binary_ufuncs.py::TestBinaryUfuncs::test_pow",
        BY_NAME + "powers of complex half numbers, for which the CPU has no kernel",
    ),
    Declared(
        "test_binary_ufuncs.py::TestBinaryUfuncs::test_fmod_remainder_by_zero_integral",
        BY_NAME + "the numbers that its kernels make of a division by zero, an error of the CPU's",
    ),
    Declared(
        "test_nn.py::TestNNDeviceType::test_upsamplingBiMode2d_nonsupported_dtypes",
        BY_NAME + "no kernel for uint8, which the CPU's kernels take, as the test excuses there",
    ),
    Declared(
        "test_sparse_csr.py::TestSparseCSR::test_block_triangular_solve",
        BY_NAME + "the cases that it leaves out for the CPU, as its kernel cannot do them",
    ),
    Declared(
        "test_meta.py::TestMeta::test_meta_outplace(_native_batch_norm_legit)",
        BY_NAME + "the CPU's kernel saves nothing in evaluation, which the test excuses there",
    ),
    Declared(
        "nn/test_embedding.py::*::test_EmbeddingBag_per_sample_weights_and_offsets",
        RANDOM,
    ),
    Declared(
        "test_masked.py::TestMasked::test_mask_layout(sparse_coo_masked_prod) "
        "test_sparse.py::TestSparse::test_sparse_addmm",
        RANDOM,
    ),
    Declared(
        "test_torch.py::TestTorchDeviceType::test_grad_scaling_state_dict",
        "expects of each device but CUDA that its scale is a `torch.FloatTensor`, the CPU's type",
    ),
    Declared(
        "test_torch.py::TestTorchDeviceType::test_grad_scaler_deprecated_warning",
        "expects of `torch.cpu.amp.GradScaler` that its text has the name of any device but CUDA",
    ),
    Declared(
        "test_custom_ops.py::TestCustomOpTesting::test_autograd_registration_check_* "
        "test_custom_ops.py::TestCustomOpTesting::test_opcheck_opinfo",
        "PyTorch's `autograd_registration_check` knows the CPU, CUDA and XPU alone",
    ),
    Declared(
        "test_custom_ops.py::TestCustomOpTesting::test_incorrect_schema_mutation",
        "the test registers its operator for the CPU and CUDA alone",
    ),
    Declared(
        "test_indexing.py::TestIndexing::test_index_put_accumulate_large_tensor",
        "needs 8 GiB of device memory; PyTorch's check before it knows CUDA's alone",
    ),
    Declared(
        "test_linalg.py::TestLinalg::test_compile_int4_mm",
        BY_NAME + "weights of the CPU are packed by another operator",
    ),
    Declared(
        _of_inductor("test_custom_op_*"),
        "the test registers its operator for the CPU and CUDA alone",
    ),
    Declared(
        _of_inductor(
            "test_layer_norm test_neg_index test_inner_fn_str_and_stride "
            "test_scheduler_vertical_fusion1 test_softmax_one_*"
        ),
        BY_NAME + "one kernel of Triton's, its code, or a name that PyTorch no longer has",
    ),
    Declared(
        _of_inductor(
            "test_philox_rand test_scaled_dot_product_efficient_attention test_cudnn_rnn "
            "test_batch_norm_2d_2 test_unspec_inputs*"
        ),
        BY_NAME + "operators or tensors of CUDA",
    ),
    Declared(
        _of_inductor(
            "test_kwargs test_linear_float64 test_randn_with_dtype_and_device "
            "test_conv3d_channels_last"
        ),
        "run with 16 bits on all but the CPU, of which the test leaves CUDA out by its name",
    ),
    Declared(
        _of_inductor("test_like_rands"),
        "takes 16-bit random numbers to be those of 32 bits, rounded: the CPU's are not, neither",
    ),
    # ---- Faults of this device ----
    Declared(
        "test_nestedtensor.py::TestNestedTensorSubclass::test_dummy_mha_with_nt",
        "PyTorch finds no kernel of attention for nested tensors of this device",
        to_mend=True,
    ),
    Declared(
        "test_ops.py::TestCommon::test_dtypes(nn_functional_max_pool1d)",
        "takes integers, by way of `max_pool2d`, where the CPU's kernel refuses them",
        to_mend=True,
    ),
)
