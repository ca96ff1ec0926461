"""Composite operators of PyTorch that read memory on the host.

composites.py is the search that found them, composites.txt lists the operators it went through."""

import os
import random

import composites
import pytest
import torch

HERE = os.path.dirname(os.path.abspath(__file__))
DEVICE = "openreg:0"
a = torch.ops.aten


def ltm():
    return torch.ones(2, 30, 30, dtype=torch.long).tril()


def mask():
    return torch.tensor([True, False, True, True])


# Given `d`, which puts a tensor on the device.
READERS = {
    "range.out_": lambda d: a.range.out_(0, 3, out=d(torch.empty(0))),
    "_grid_sampler_2d_cpu_fallback": lambda d: a._grid_sampler_2d_cpu_fallback(
        d(torch.randn(1, 1, 4, 4)), d(torch.rand(1, 3, 3, 2) * 2 - 1), 0, 0, False
    ),
    "_grid_sampler_2d_cpu_fallback.out": lambda d: a._grid_sampler_2d_cpu_fallback.out(
        d(torch.randn(1, 1, 4, 4)),
        d(torch.rand(1, 3, 3, 2) * 2 - 1),
        0,
        0,
        False,
        out=d(torch.empty(0)),
    ),
    "_grid_sampler_2d_cpu_fallback_backward": lambda d: a._grid_sampler_2d_cpu_fallback_backward(
        d(torch.ones(1, 1, 3, 3)),
        d(torch.randn(1, 1, 4, 4)),
        d(torch.rand(1, 3, 3, 2) * 2 - 1),
        0,
        0,
        False,
    ),
    "_reshape_from_tensor": lambda d: torch._reshape_from_tensor(
        d(torch.arange(6.0)), d(torch.tensor([2, 3]))
    ),
    "_rowwise_prune": lambda d: torch._rowwise_prune(d(torch.randn(4, 3)), d(mask()), torch.int32),
    "_saturate_weight_to_fp16": lambda d: torch._saturate_weight_to_fp16(
        d(torch.randn(4, 4) * 1e5)
    ),
    "choose_qparams_optimized": lambda d: torch.choose_qparams_optimized(
        d(torch.randn(16)), 16, 10, 0.16, 8
    ),
    "fbgemm_linear_quantize_weight": lambda d: torch.fbgemm_linear_quantize_weight(
        d(torch.randn(4, 4))
    ),
    "_sobol_engine_draw": lambda d: torch._sobol_engine_draw(
        d(torch.zeros(2, dtype=torch.long)), 3, d(torch.arange(60).view(2, 30)), 2, 0, torch.float
    ),
    "_sobol_engine_ff_": lambda d: torch._sobol_engine_ff_(
        d(torch.zeros(2, dtype=torch.long)), 3, d(torch.arange(60).view(2, 30)), 2, 0
    ),
    "_sobol_engine_scramble_": lambda d: torch._sobol_engine_scramble_(
        d(torch.arange(60).view(2, 30)), d(ltm()), 2
    ),
    "_sobol_engine_initialize_state_": lambda d: torch._sobol_engine_initialize_state_(
        d(torch.zeros(2, 30, dtype=torch.long)), 2
    ),
}

REFUSED = {
    "fbgemm_pack_gemm_matrix_fp16": lambda x: torch.fbgemm_pack_gemm_matrix_fp16(x),
    "fbgemm_pack_quantized_matrix": lambda x: torch.fbgemm_pack_quantized_matrix(x.char()),
    "fbgemm_pack_quantized_matrix.KN": lambda x: torch.fbgemm_pack_quantized_matrix(x.char(), 4, 4),
    "fbgemm_linear_fp16_weight": lambda x: torch.fbgemm_linear_fp16_weight(x, x, x),
    "fbgemm_linear_fp16_weight.out": lambda x: torch.fbgemm_linear_fp16_weight(x, x, x, x),
    "fbgemm_linear_fp16_weight_fp32_activation": lambda x: (
        torch.fbgemm_linear_fp16_weight_fp32_activation(x, x.cpu(), x)
    ),
    "fbgemm_linear_fp16_weight_fp32_activation.out": lambda x: (
        torch.fbgemm_linear_fp16_weight_fp32_activation(x, x.cpu(), x, x)
    ),
    "fbgemm_linear_int8_weight": lambda x: torch.fbgemm_linear_int8_weight(
        x, x.char(), x.cpu(), x.int(), 1.0, 0, x
    ),
    "fbgemm_linear_int8_weight_fp32_activation": lambda x: (
        torch.fbgemm_linear_int8_weight_fp32_activation(x, x.char(), x.cpu(), x.int(), 1.0, 0, x)
    ),
}


def listed(result):
    return list(result) if isinstance(result, tuple | list) else [result]


def result_on(device, name):
    torch.manual_seed(0)
    return listed(READERS[name](lambda tensor: tensor.to(device)))


@pytest.mark.filterwarnings("ignore:FOUND weight", "ignore:fbgemm_")
@pytest.mark.parametrize("name", READERS)
def test_composite_results_are_the_cpus_and_on_the_device(name):
    for _ in range(3):  # the fast path comes after the first
        for got, expected in zip(result_on(DEVICE, name), result_on("cpu", name), strict=True):
            if isinstance(expected, torch.Tensor):
                assert got.device == torch.device(DEVICE)
                got = got.cpu()
            torch.testing.assert_close(got, expected, rtol=0, atol=0)


# Their caller learns data, so they wait, which a capture refuses.
WAIT = {"_reshape_from_tensor", "_rowwise_prune", "_saturate_weight_to_fp16"}
WAIT |= {"fbgemm_linear_quantize_weight"}


@pytest.mark.parametrize("name", sorted(READERS.keys() - WAIT))
def test_composite_in_a_replay_gives_the_cpus_results(name):
    result_on(DEVICE, name)
    made = []
    torch.manual_seed(0)
    READERS[name](lambda tensor: made.append(tensor.to(DEVICE)) or tensor)
    there, graph = iter(made), torch.openreg.Graph()
    with torch.openreg.graph(graph):
        got = listed(READERS[name](lambda tensor: next(there)))
    graph.replay()
    for tensor, expected in zip(got, result_on("cpu", name), strict=True):
        torch.testing.assert_close(tensor.cpu(), expected, rtol=0, atol=0)


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("name", REFUSED)
def test_composite_that_packs_weights_for_the_cpu_is_refused_by_name(name):
    with pytest.raises(NotImplementedError, match=rf"aten::{name} on openreg: .*x\.cpu\(\)"):
        REFUSED[name](torch.ones(4, 4, device=DEVICE))


def test_reshape_from_a_tensor_of_sizes_is_a_view_with_a_gradient():
    x = torch.arange(6.0, device=DEVICE, requires_grad=True)
    y = torch._reshape_from_tensor(x, torch.tensor([2, 3], device=DEVICE))
    assert y.data_ptr() == x.data_ptr()
    y[1].sum().backward()
    assert x.grad.tolist() == [0, 0, 0, 1, 1, 1]


def test_composite_results_are_the_cpus_under_cudas_name(run):
    done = run(
        f"""
        import sys, torch, torch_openreg
        torch_openreg.as_cuda()
        sys.path.append({HERE!r})
        import test_composites
        test_composites.DEVICE = "cuda:0"
        for name in test_composites.READERS:
            test_composites.test_composite_results_are_the_cpus_and_on_the_device(name)
        print(len(test_composites.READERS))
        """
    )
    assert done.out == f"{len(READERS)}\n", done.err


# ---- what a subclass sees ----


class Wrapper(torch.Tensor):
    """Has no memory, and keeps the names of the operators that it is handed."""

    @staticmethod
    def __new__(cls, like, device):
        return torch.Tensor._make_wrapper_subclass(cls, like.shape, dtype=like.dtype, device=device)

    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        cls.seen.append(str(func))
        raise NotImplementedError("not taken")


Wrapper.seen = []


def seen_by_a_wrapper(name, device):
    Wrapper.seen = []
    with pytest.raises((NotImplementedError, RuntimeError)) as error:
        READERS[name](lambda tensor: Wrapper(tensor, device))
    return Wrapper.seen, type(error.value)


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("name", READERS)
def test_composite_hands_a_subclass_what_other_backends_do(name):
    """The meta device stands for any: it has no kernels of its own for these."""
    assert seen_by_a_wrapper(name, DEVICE) == seen_by_a_wrapper(name, "meta")


# ---- the list ----


def test_composites_list_has_every_composite_operator():
    called, not_called = composites.reads_list()
    added = set(composites.composites()) - called - not_called
    assert not added, (
        f"PyTorch {torch.__version__} has {len(added)} composite operators that no search has gone "
        "through. `python tests/support/composites.py NAME...` calls them over memory that faults; "
        "those that read it go into csrc/aten/ops/host_readers.cpp, and all go into "
        f"tests/support/composites.txt (--write): {', '.join(sorted(added))}"
    )


def test_composites_list_has_the_known_readers():
    called, not_called = composites.reads_list()
    known = composites.generated() | called | not_called
    assert {f"aten::{name}" for name in (*READERS, *REFUSED)} <= known


def test_composites_search_finds_a_host_access(run):
    """In a process that has used no device, as it forks."""
    done = run(
        """
        import ctypes, torch, torch_openreg, composites
        def reads(*arguments):
            ctypes.string_at(torch.ones(1, device="openreg").data_ptr(), 1)
        call = composites.call
        composites.call = lambda *a: call(*a) and (a[-1] == "cpu" or reads())
        print(*(report is not None for _, _, report in composites.search(["aten::relu"])))
        """
    )
    assert done.out == "True\n", done.err


@pytest.mark.slow
def test_composites_search_of_a_sample_finds_no_host_access(run):
    called, _ = composites.reads_list()
    sample = random.Random(0).sample(sorted(called), 40) + [f"aten::{n}" for n in REFUSED]
    done = run(f"import composites; print([x for x in composites.search({sample}) if x[2]])")
    assert done.out == "[]\n", done.err
