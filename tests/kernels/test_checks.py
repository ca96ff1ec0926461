"""What the sanitizer finds in launches of Triton's kernels: for each kind of mistake a program that
makes it, and its twin that does not."""

import pickle
import re
import warnings

import pytest
import torch

triton = pytest.importorskip("triton")
tl = pytest.importorskip("triton.language")

import torch_openreg  # noqa: E402

torch_openreg.triton()
sanitizer = torch.openreg.sanitizer
DEVICE = "openreg:0"
BLOCK = 16


@triton.jit
def fill_kernel(out_ptr, start, value, n, BLOCK: tl.constexpr):
    at = start + tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out_ptr + at, value, mask=at < start + n)


@triton.jit
def copy_kernel(x_ptr, out_ptr, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + at)  # without a mask
    tl.store(out_ptr + at, x, mask=at < n)


@triton.jit
def shift_kernel(x_ptr, by, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + at + by, mask=at + by < n)
    tl.store(x_ptr + at, x, mask=at < n)


@triton.jit
def sum_kernel(x_ptr, out_ptr, ATOMIC: tl.constexpr, BLOCK: tl.constexpr):
    total = tl.sum(tl.load(x_ptr + tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)))
    if ATOMIC:
        tl.atomic_add(out_ptr, total)
    else:
        tl.store(out_ptr, tl.load(out_ptr) + total)


@triton.jit
def order_kernel(x_ptr):
    at = tl.program_id(0)
    before = tl.load(x_ptr + at - 1, mask=at > 0, other=0)
    tl.store(x_ptr + at, before + 1)


@triton.jit
def table_kernel(table_ptr, BLOCK: tl.constexpr):
    at, program = tl.arange(0, BLOCK), tl.program_id(0)
    x_ptr = tl.load(table_ptr + program).to(tl.pointer_type(tl.float32))
    tl.store(x_ptr + at, tl.load(x_ptr + at) + 1)


@triton.jit
def gather_kernel(x_ptr, index_ptr, out_ptr, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    tl.store(out_ptr + at, tl.load(x_ptr + tl.load(index_ptr + at)))


@pytest.fixture
def reports():
    """Those of the test, which raise nothing."""
    mode = "warn" if sanitizer.is_enabled() else None
    sanitizer.enable("warn", initcheck=True)
    sanitizer.clear()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield sanitizer.reports
    torch.openreg.synchronize()
    sanitizer.clear()
    if mode is None:
        sanitizer.disable()


def line_of(kernel, text):
    """The place of the line of a kernel that has this text."""
    lines = kernel.src.splitlines()
    (number,) = (i for i, line in enumerate(lines) if text in line)
    return f"test_checks.py:{kernel.def_file_line_number + number}"


@pytest.mark.parametrize("second, found", [(64, 0), (48, 1)])
def test_halves_of_a_tensor_by_two_streams(reports, second, found):
    out = torch.zeros(128, device=DEVICE)
    side = torch.openreg.Stream()
    side.wait_stream(torch.openreg.current_stream())
    fill_kernel[(4,)](out, 0, 1.0, 64, BLOCK=BLOCK)
    with torch.openreg.stream(side):
        fill_kernel[(4,)](out, second, 2.0, 64, BLOCK=BLOCK)
    assert len(reports()) == found
    for report in reports():
        assert report.kind == "race" and report.end - report.begin == 64
        text = str(report)
        assert "fill_kernel[(4,)](out, 0, 1.0" in text and "fill_kernel[(4,)](out, second" in text
        assert "help: before" in text
    torch.openreg.current_stream().wait_stream(side)


@pytest.mark.parametrize("n, wrong", [(32, False), (30, True)])
def test_reads_out_of_bounds_are_named_and_nothing_runs(reports, n, wrong):
    x, out = torch.ones(n, device=DEVICE), torch.zeros(n, device=DEVICE)
    if not wrong:
        copy_kernel[(2,)](x, out, n, BLOCK=BLOCK)
        assert out.sum().item() == n and not reports()
        return
    with pytest.raises(IndexError, match="copy_kernel reads x_ptr out of bounds") as caught:
        copy_kernel[(2,)](x, out, n, BLOCK=BLOCK)
    assert line_of(copy_kernel, "without a mask") in str(caught.value)
    assert "program 1 reads 0 bytes behind the end of its 120 bytes" in str(caught.value)
    assert out.count_nonzero().item() == 0


@pytest.mark.parametrize("by, found", [(0, 0), (BLOCK, 1)])
def test_programs_that_read_what_others_write(reports, by, found):
    x = torch.ones(64, device=DEVICE)
    shift_kernel[(4,)](x, by, 64, BLOCK=BLOCK)
    assert [report.kind for report in reports()] == ["race of a grid"] * found
    for report in reports():
        write, read = line_of(shift_kernel, "tl.store"), line_of(shift_kernel, "tl.load")
        places = re.findall(r"^  \S*(test_checks.py:\d+)", str(report), re.MULTILINE)
        assert places[:2] == [read, write] and "shift_kernel[(4,)]" in str(report)
        assert re.search(r"\n +\^+\n +program 0 reads x_ptr at byte 64\n", str(report))
        assert "program 1 writes x_ptr at byte 64" in str(report)
        assert report.place[1] == shift_kernel.def_file_line_number + 3
        copied = pickle.loads(pickle.dumps(report))
        assert str(copied) == str(report) and "program 1 writes" in report.details()


@pytest.mark.parametrize("atomic", [True, False])
def test_programs_that_add_to_one_number(reports, atomic):
    x, out = torch.ones(64, device=DEVICE), torch.zeros(1, device=DEVICE)
    sum_kernel[(4,)](x, out, atomic, BLOCK=BLOCK)
    assert [report.kind for report in reports()] == ["race of a grid"] * (not atomic)
    if atomic:
        assert out.item() == 64


def test_race_of_a_grid_is_an_error_and_nothing_runs(reports):
    x, out = torch.ones(64, device=DEVICE), torch.zeros(1, device=DEVICE)
    sanitizer.enable("error")
    with pytest.raises(sanitizer.DataRaceError, match="race between the programs of one launch"):
        sum_kernel[(4,)](x, out, False, BLOCK=BLOCK)
    sanitizer.enable("warn")
    assert out.item() == 0


@pytest.mark.parametrize("written", [128, 96])
def test_unwritten_memory(reports, written):
    x, out = torch.empty(128, device=DEVICE), torch.empty(128, device=DEVICE)
    fill_kernel[(8,)](x, 0, 1.0, written, BLOCK=BLOCK)
    copy_kernel[(8,)](x, out, 128, BLOCK=BLOCK)
    assert [report.kind for report in reports()] == ["uninitialized"] * (written < 128)


@pytest.mark.parametrize("known", [True, False])
def test_addresses_from_an_index(reports, known):
    """Exact where the index may be read, and else possible."""
    x = torch.ones(1024, device=DEVICE)
    index = torch.arange(BLOCK, device=DEVICE, dtype=torch.int32)
    out = torch.zeros(BLOCK, device=DEVICE)
    side = torch.openreg.Stream()
    side.wait_stream(torch.openreg.current_stream())
    if known:
        torch.openreg.synchronize()
    with torch.openreg.stream(side):
        fill_kernel[(8,)](x, 512, 2.0, 128, BLOCK=BLOCK)
    gather_kernel[(1,)](x, index, out, BLOCK=BLOCK)
    assert [report.kind for report in reports()] == ["possible race"] * (not known)
    if known:
        index.fill_(2000)
        torch.openreg.synchronize()
        with pytest.raises(IndexError, match="gather_kernel reads x_ptr out of bounds"):
            gather_kernel[(1,)](x, index, out, BLOCK=BLOCK)
    torch.openreg.current_stream().wait_stream(side)


def test_kernel_that_needs_the_order_of_its_programs_is_found_by_some_seed():
    def seeded(seed):
        with torch.openreg.testing.schedule(seed=seed):
            x = torch.zeros(8, device=DEVICE, dtype=torch.int32)
            order_kernel[(8,)](x)
            return x.tolist()

    found = [seeded(seed) for seed in range(4)]
    assert found == [seeded(seed) for seed in range(4)]
    assert len({tuple(values) for values in found}) > 1


@pytest.mark.parametrize("ordered", [True, False])
def test_tensors_of_a_pointer_table(reports, ordered):
    """Their addresses are read at the call, so that races with them are found."""
    x, y = torch.ones(BLOCK, device=DEVICE), torch.ones(BLOCK, device=DEVICE)
    table = torch.tensor([x.data_ptr(), y.data_ptr()], device=DEVICE)
    side = torch.openreg.Stream()
    torch.openreg.synchronize()
    with torch.openreg.stream(side):
        table_kernel[(2,)](table, BLOCK=BLOCK)
    if ordered:
        torch.openreg.current_stream().wait_stream(side)
    y.add_(1)
    assert [report.kind for report in reports()] == ["race"] * (not ordered)
    torch.openreg.synchronize()
    assert x.tolist() == [2.0] * BLOCK and (not ordered or y.tolist() == [3.0] * BLOCK)
    table.fill_(4096)
    torch.openreg.synchronize()
    with pytest.raises(IndexError, match="table_kernel reads memory of no argument"):
        table_kernel[(2,)](table, BLOCK=BLOCK)


@pytest.mark.parametrize("waits", [True, False])
def test_pinned_memory_of_the_host(reports, waits):
    x = torch.ones(64).pin_memory()
    fill_kernel[(4,)](x, 0, 3.0, 64, BLOCK=BLOCK)
    if waits:
        torch.openreg.synchronize()
    values = x.sum()
    assert [report.kind for report in reports()] == ["race"] * (not waits)
    assert not waits or values.item() == 192


def test_memory_that_is_not_mapped_is_checked_too(run_ok, plugins):
    program = """
        import warnings
        import torch
        from kernels.test_checks import BLOCK, copy_kernel, fill_kernel, sanitizer, sum_kernel

        warnings.simplefilter("ignore")
        sanitizer.enable("warn", initcheck=True)
        x, y, total = (torch.zeros(n, device="openreg") for n in (64, 40, 1))
        side = torch.openreg.Stream()
        side.wait_stream(torch.openreg.current_stream())
        with side:
            fill_kernel[(2,)](x, 0, 2.0, 32, BLOCK=BLOCK)
        fill_kernel[(2,)](x, 32, 2.0, 32, BLOCK=BLOCK)
        torch.openreg.current_stream().wait_stream(side)
        sum_kernel[(4,)](x, total, True, BLOCK=BLOCK)
        print(total.item(), sanitizer.reports())
        sum_kernel[(4,)](x, total, False, BLOCK=BLOCK)
        with side:
            fill_kernel[(1,)](x, 0, 3.0, 8, BLOCK=BLOCK)
        print([report.kind for report in sanitizer.reports()])
        try:
            copy_kernel[(3,)](y, x, 40, BLOCK=BLOCK)
        except IndexError as error:
            print("copy_kernel" in str(error))
    """
    out = run_ok(program, {"OPENREG_PLUGIN": str(plugins / "libvendor_nomap.so")})
    assert out.splitlines() == ["128.0 []", "['race of a grid', 'race']", "True"]


def test_launches_on_memory_that_is_not_mapped_record_no_gradient(run_ok, plugins):
    program = """
        import torch
        from kernels.test_checks import BLOCK, copy_kernel, fill_kernel

        w = torch.ones(64, device="openreg", requires_grad=True)
        a = w * 2
        for x in (a, w):
            fill_kernel[(1,)](x, 0, 2.0, BLOCK, BLOCK=BLOCK)
            print(x._version)
        a.sum().backward()
        print(w.grad.unique().tolist())
        with torch.inference_mode():
            x = torch.ones(64, device="openreg")
        fill_kernel[(1,)](x, 0, 2.0, BLOCK, BLOCK=BLOCK)
        print(x.sum().item())
        big = torch.full((1 << 20,), 5.0, device="openreg")
        p, q = torch.zeros(1 << 20).pin_memory(), torch.zeros(64).pin_memory()
        torch.openreg._sleep(20_000_000)
        p.copy_(big, non_blocking=True)
        copy_kernel[(4,)](p[-64:], q, 64, BLOCK=BLOCK)
        torch.openreg.synchronize()
        print(q.unique().tolist())
    """
    out = run_ok(program, {"OPENREG_PLUGIN": str(plugins / "libvendor_nomap.so")})
    assert out.splitlines() == ["0", "0", "[2.0]", "80.0", "[5.0]"]
