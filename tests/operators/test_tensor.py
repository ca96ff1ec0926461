"""Tensors of the device: making them, looking at them, and what is refused."""

import signal

import pytest
import torch

import torch_openreg  # noqa: F401

DEVICE = "openreg:0"
two_devices = pytest.mark.skipif("torch.openreg.device_count() < 2")

# ---- Factories ----


@pytest.mark.parametrize(
    "make",
    [
        lambda device: torch.empty(2, 3, device=device),
        lambda device: torch.empty_strided((2, 3), (1, 2), device=device),
        lambda device: torch.zeros(2, 3, device=device),
        lambda device: torch.ones(2, 3, device=device, dtype=torch.int16),
        lambda device: torch.full((2, 3), 7.0, device=device),
        lambda device: torch.arange(6, device=device),
        lambda device: torch.linspace(0, 1, 5, device=device),
        lambda device: torch.eye(3, device=device),
        lambda device: torch.tensor([1.0, 2.0], device=device),
        lambda device: torch.rand(4, device=device),
        lambda device: torch.randint(0, 9, (4,), device=device),
        lambda device: torch.randperm(8, device=device),
        lambda device: torch.tril_indices(3, 3, device=device),
        lambda device: torch.zeros(3, device=device).new_ones(2),
    ],
)
def test_factories_are_on_the_device(make):
    expected = make("cpu")
    tensor = make(DEVICE)
    assert tensor.device == torch.device(DEVICE)
    assert tensor.shape == expected.shape and tensor.dtype == expected.dtype
    assert tensor.stride() == expected.stride()


def test_factories_have_the_expected_values():
    assert torch.arange(6, device=DEVICE).tolist() == list(range(6))
    assert torch.full((2,), 7.0, device=DEVICE).tolist() == [7.0, 7.0]
    assert torch.eye(2, device=DEVICE).tolist() == [[1.0, 0.0], [0.0, 1.0]]
    assert sorted(torch.randperm(100, device=DEVICE).tolist()) == list(range(100))
    assert torch.tril_indices(2, 2, device=DEVICE).tolist() == [[0, 1, 1], [0, 0, 1]]


@two_devices
def test_current_device_is_where_a_tensor_without_index_goes():
    with torch.accelerator.device_index(1):
        assert torch.empty(1, device="openreg").device.index == 1
        assert torch.arange(3, device="openreg").device.index == 1
        assert torch.randn(100, device="openreg:1").mul(2).device.index == 1
    assert torch.accelerator.current_device_index() == 0
    with pytest.raises(ZeroDivisionError), torch.accelerator.device_index(1):
        raise ZeroDivisionError
    assert torch.accelerator.current_device_index() == 0


@two_devices
def test_randn_on_another_device_stays_there():
    with torch.accelerator.device_index(1):
        doubled = torch.randn(100, device="openreg:1") * 2
    torch.accelerator.synchronize(1)
    assert doubled.device.index == 1
    assert 1 < doubled.std().item() < 3


@pytest.mark.parametrize("index", [2, 17, 99])
@pytest.mark.parametrize(
    "make",
    [
        lambda device: torch.empty(2, device=device),
        lambda device: torch.empty_strided((2,), (1,), device=device),
        lambda device: torch.arange(3, device=device),
        lambda device: torch.randn(3, device=device),
        lambda device: torch.tensor([1.0], device=device),
        lambda device: torch.zeros(3).to(device),
    ],
)
def test_bad_device_index_is_named_with_its_range(make, index):
    count = torch.openreg.device_count()
    with pytest.raises(RuntimeError, match=rf"{index + count}.*{count}"):
        make(f"openreg:{index + count}")
    assert torch.ones(2, device=DEVICE).sum().item() == 2


def test_negative_sizes_are_refused():
    with pytest.raises(RuntimeError, match="-1"):
        torch.empty(-1, device=DEVICE)
    with pytest.raises(RuntimeError, match="-3"):
        torch.empty(2, device=DEVICE).resize_(-3)
    with pytest.raises(RuntimeError, match="-8"):
        torch.UntypedStorage(-8, device=DEVICE)


def test_byteswap_of_device_memory_is_refused():
    x = torch.arange(4, dtype=torch.int16, device=DEVICE)
    with pytest.raises(NotImplementedError, match=r"(?s)byteswap.*storage\.cpu\(\)"):
        x.untyped_storage().byteswap(x.dtype)
    swapped = x.cpu()
    swapped.untyped_storage().byteswap(x.dtype)
    assert swapped.tolist() == [0, 256, 512, 768] and x.tolist() == [0, 1, 2, 3]
    assert torch.ones(2, device=DEVICE).sum().item() == 2


def test_pinned_device_memory_is_refused():
    with pytest.raises(RuntimeError, match="pinned"):
        torch.empty(2, device=DEVICE, pin_memory=True)


def test_empty_tensors_keep_their_shapes():
    empty = torch.empty(0, 3, device=DEVICE)
    assert empty.cpu().shape == (0, 3)
    assert (empty + 1).shape == (0, 3)
    assert empty.sum().item() == 0
    assert torch.cat([empty, torch.ones(1, 3, device=DEVICE)]).shape == (1, 3)


# ---- Views ----


def test_views_share_the_storage():
    base = torch.arange(12.0, device=DEVICE)
    expected = torch.arange(12.0)
    for view in (
        lambda t: t.view(3, 4),
        lambda t: t.view(3, 4).t(),
        lambda t: t[2:9:3],
        lambda t: t.view(3, 4)[:, 1],
        lambda t: t.as_strided((2, 2), (1, 5), 1),
        lambda t: t.unfold(0, 4, 2),
        lambda t: t.view(3, 4).diagonal(),
        lambda t: t.expand(2, 12),
        lambda t: t.view(torch.int32),
        lambda t: torch.view_as_complex(t.view(6, 2)),
        lambda t: t.detach(),
    ):
        seen, wanted = view(base), view(expected)
        assert seen._is_view() == wanted._is_view() or seen.is_set_to(base)
        assert seen.untyped_storage().data_ptr() == base.untyped_storage().data_ptr()
        assert seen.storage_offset() == wanted.storage_offset()
        assert torch.equal(seen.cpu(), wanted)
    base.view(3, 4)[1].add_(100)
    assert base.tolist() == [0, 1, 2, 3, 104, 105, 106, 107, 8, 9, 10, 11]


def test_views_do_not_wait_for_the_stream():
    x = torch.arange(12.0, device=DEVICE)
    with torch.openreg.testing.gate() as gate:
        gate.wait()
        assert x.view(3, 4).t()[1:].unfold(0, 2, 1).shape == (2, 3, 2)
        assert torch.view_as_complex(x.view(6, 2)).conj().is_conj()
        assert not torch.openreg.current_stream().query()


def test_set_and_resize_change_storage_and_sizes():
    x = torch.arange(4.0, device=DEVICE)
    y = torch.empty(0, device=DEVICE).set_(x)
    assert y.is_set_to(x)
    y.set_(x.untyped_storage(), 1, (2,), (2,))
    assert y.tolist() == [1.0, 3.0]
    x.resize_(8)
    assert x[:4].tolist() == [0.0, 1.0, 2.0, 3.0]
    x.resize_(2, 2)
    assert x.tolist() == [[0.0, 1.0], [2.0, 3.0]]
    x.set_()
    assert x.numel() == 0


def test_storage_resizes_in_stream_order():
    storage = torch.arange(4, dtype=torch.uint8, device=DEVICE).untyped_storage()
    storage.resize_(1 << 20)
    assert torch.empty(0, dtype=torch.uint8, device=DEVICE).set_(storage)[:4].tolist() == [
        0,
        1,
        2,
        3,
    ]
    storage.resize_(0)
    assert storage.size() == 0


@pytest.mark.parametrize(
    "make",
    [torch.empty, torch.zeros, lambda n, **how: torch.empty_strided((n,), (2,), **how)],
    ids=["empty", "zeros", "empty_strided"],
)
def test_complex_half_warns_as_on_the_cpu(make, request):
    torch.set_warn_always(True)  # else it comes once a process
    request.addfinalizer(lambda: torch.set_warn_always(False))
    for device in ("cpu", DEVICE, "openreg:1"):
        with pytest.warns(UserWarning, match="ComplexHalf support is experimental") as caught:
            x = make(3, dtype=torch.complex32, device=device)
        assert len(caught) == 1
        assert (x.device, x.dtype) == (torch.device(device), torch.complex32)


compiled = torch.compile(lambda x: x + 1)

USES = {
    "pointwise": lambda x: x + 1,
    "in place": lambda x: x.add_(1),
    "out=": lambda x: torch.add(torch.ones(1000, device=DEVICE), 1, out=x),
    "reduction": lambda x: x.sum(),
    "what depends on data": lambda x: x.unique(),
    "a list": lambda x: torch._foreach_add([x], 1),
    "sparse": lambda x: x.to_sparse(),
    "as sparse values": lambda x: torch.sparse_coo_tensor(
        torch.arange(1000, device=DEVICE)[None], x, (1000,), check_invariants=False
    ).coalesce(),
    "added to a sparse one": lambda x: x + torch.ones(1000, device=DEVICE).to_sparse(),
    "a product with a sparse one": lambda x: torch.eye(1000, device=DEVICE)[:9].to_sparse_csr() @ x,
    "compiled": lambda x: compiled(x),
    "to the host": lambda x: x.cpu(),
    "from the host": lambda x: x.copy_(torch.ones(1000)),
    "cast to the host": lambda x: x.double().cpu(),
    "within a device": lambda x: x.clone(),
    "to another device": lambda x: x.to("openreg:1"),
    "from another device": lambda x: x.copy_(torch.ones(1000, device="openreg:1")),
}


def test_lazy_clone_has_its_own_memory_from_the_first():
    x = torch.arange(24.0, device=DEVICE).view(4, 6)
    for view in (x, x.t()[1:], x[1:, ::2], x[:1].expand(3, 6)):
        expected = view.cpu()
        clone = torch._lazy_clone(view)
        assert (clone.stride(), clone.storage_offset()) == (view.stride(), view.storage_offset())
        assert clone.untyped_storage().data_ptr() != view.untyped_storage().data_ptr()
        x.zero_()
        assert torch.equal(clone.cpu(), expected)
        x.copy_(torch.arange(24.0).view(4, 6))
    clone = torch._lazy_clone(torch.ones(3, device=DEVICE, requires_grad=True))
    assert clone.grad_fn is not None and torch._lazy_clone(x[:0]).shape == (0, 6)


USES_OF_VIEWS = {
    "a value": (lambda x: x[500], lambda v: v.item(), 2004),
    "gaps": (lambda x: x[::2], lambda v: v.copy_(torch.ones(500, device=DEVICE)), 3996),
    "expanded": (lambda x: x[600:601].expand(7, 3), lambda v: v + 1, 2404),
    "turned": (lambda x: x.view(10, 100).t(), lambda v: v.sum(0), 4000),
}


def refused(use, x, storage, needed, left):
    storage.resize_(left)
    with pytest.raises(RuntimeError, match=rf"needs {needed} bytes.* has {left}\b"):
        use(x)
    torch.openreg.synchronize()
    storage.resize_(4000)  # as FSDP does


@two_devices
@pytest.mark.parametrize("left", [0, 64, 3996])
@pytest.mark.parametrize("name", USES)
def test_work_on_a_storage_that_was_freed_or_shrunk_is_refused(name, left):
    use = USES[name]
    use(torch.ones(1000, device=DEVICE))  # known
    x = torch.ones(1000, device=DEVICE)
    refused(use, x, x.untyped_storage(), 4000, left)
    assert x.fill_(2).sum().item() == 2000


@pytest.mark.parametrize("name", USES_OF_VIEWS)
def test_work_on_a_view_of_a_storage_that_was_shrunk_is_refused(name):
    view, use, needed = USES_OF_VIEWS[name]
    x = torch.ones(1000, device=DEVICE)
    v = view(x)
    refused(use, v, x.untyped_storage(), needed, needed - 4)
    x.untyped_storage().resize_(needed)
    use(v)


def test_shrunk_storage_is_usable_as_far_as_it_reaches():
    x = torch.arange(1000.0, device=DEVICE)
    first, gaps, none = x[:16], x[0:16:5], x[500:500]
    x.untyped_storage().resize_(64)
    assert (first + 1).tolist() == list(range(1, 17))
    assert gaps.tolist() == [0, 5, 10, 15]
    assert (none + 1).numel() == 0


def test_freed_host_storage_is_not_copied():
    x = torch.ones(1000)
    x.untyped_storage().resize_(0)
    with pytest.raises(RuntimeError, match=r"needs 4000 bytes.* has 0\b"):
        x.to(DEVICE)
    with pytest.raises(RuntimeError, match=r"needs 4000 bytes.* has 0\b"):
        x.copy_(torch.ones(1000, device=DEVICE))


# ---- What is refused ----


def test_numpy_of_a_device_tensor_is_a_type_error():
    with pytest.raises(TypeError, match="openreg"):
        torch.ones(2, device=DEVICE).numpy()


@pytest.mark.parametrize("when", ["", "torch.openreg._sleep(10**9)", "y = x + 1", "x.cpu()"])
def test_host_read_of_device_memory_kills_the_process(run, when):
    child = run(
        f"""
        import ctypes, torch
        x = torch.arange(1024.0, device="openreg")
        {when}
        print("alive", flush=True)
        ctypes.string_at(x.data_ptr(), 4)
        print("read", flush=True)
        """
    )
    assert child.out == "alive\n", child.err
    assert child.code == -signal.SIGSEGV


def test_item_and_nonzero_read_values():
    x = torch.tensor([0.0, 2.5, 0.0, 1.0], device=DEVICE)
    assert x[1].item() == 2.5
    assert x.nonzero().flatten().tolist() == [1, 3]
    assert bool((x > 2).any())
    assert complex(torch.tensor(1 + 2j, device=DEVICE).conj()) == 1 - 2j
    with pytest.raises(RuntimeError):
        x.item()


def test_tensor_is_printed_with_its_device():
    assert "openreg:0" in repr(torch.ones(3, device=DEVICE))


# ---- Autograd, inference mode ----


def test_requires_grad_builds_a_graph():
    x = torch.ones(3, device=DEVICE, requires_grad=True)
    y = (x * x).sum()
    assert y.requires_grad and y.grad_fn is not None
    y.backward()
    assert x.grad.device == x.device and x.grad.tolist() == [2.0, 2.0, 2.0]
    with torch.no_grad():
        assert not (x * 2).requires_grad


def test_inference_mode_marks_results():
    x = torch.ones(3, device=DEVICE)
    with torch.inference_mode():
        made = x.sort()[0]
        assert made.is_inference() and (x + 1).is_inference()
        assert not x.view(3, 1).is_inference()
    assert made.tolist() == [1.0, 1.0, 1.0]
    assert not x.sort()[0].is_inference()


def test_inplace_on_a_leaf_is_refused():
    x = torch.ones(3, device=DEVICE, requires_grad=True)
    with pytest.raises(RuntimeError, match="leaf"):
        x.add_(1)


def test_versions_count_in_place_writes():
    x = torch.ones(3, device=DEVICE, requires_grad=True)
    y = x * 1
    z = y * y
    y.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        z.sum().backward()
