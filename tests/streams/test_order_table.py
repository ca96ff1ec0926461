"""The table of docs/streams.md: for which calls the host waits, and what they order.

Each call of its first column is run as it stands there."""

import re
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from race_pairs import found, openreg

pytestmark = pytest.mark.filterwarnings("ignore:Sparse CSR", "ignore:.*Sparse")

PAGE = Path(__file__).resolve().parents[2] / "docs" / "streams.md"
HEAD = "| call | the host waits: CUDA | here | it orders: CUDA | here |"
BETWEEN = 'x.to("openreg:1")'  # it orders other streams than the rest


def rows():
    """(call, whether the host waits, whether it orders anything), as the table says of here."""
    lines = PAGE.read_text().split(HEAD)[1].strip().splitlines()[1:]
    for line in lines[: next((i for i, x in enumerate(lines) if not x.startswith("|")), None)]:
        calls, _, waits, _, orders = (cell.strip() for cell in line.strip("|").split(" | "))
        for call in re.findall("`([^`]+)`", calls):
            yield call, waits.split(",")[0] != "no", orders != "nothing"


ROWS = {call: (waits, orders) for call, waits, orders in rows()}


@pytest.fixture(scope="module")
def group(tmp_path_factory):
    """A process group of this process alone."""
    store = tmp_path_factory.mktemp("group") / "store"
    dist.init_process_group(init_method=f"file://{store}", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def names():
    """What the calls use, all of it done. The current stream has been given work on x and y."""
    device = "openreg"
    model = torch.nn.Linear(4, 4)
    n = SimpleNamespace(
        torch=torch,
        dist=dist,
        device=device,
        x=torch.ones(4, device=device),
        y=torch.ones(4, device=device),
        host=torch.ones(4),
        large=torch.ones(1 << 20),
        pinned=torch.ones(4, pin_memory=True),
        indices=torch.tensor([1, 2]),
        mask=torch.ones(4, device=device) > 0,
        model=model,
        there=torch.nn.Linear(4, 4).to(device),
        state=model.state_dict(),
        dense=torch.eye(4, device=device),
        ij=torch.tensor([[1, 0], [2, 3]], device=device),
        values=torch.ones(2, device=device),
        stream=openreg.current_stream(),
        side=openreg.Stream(),
        event=openreg.Event(),
    )
    n.optimizer = torch.optim.AdamW(n.there.parameters())
    n.loss = n.there(n.dense).sum()
    n.csr, n.coo = n.dense.to_sparse_csr(), n.dense.to_sparse()
    n.uncoalesced = torch.sparse_coo_tensor(n.ij, n.values, (4, 4))
    n.loss.backward(retain_graph=True)
    openreg.synchronize()
    openreg.synchronize(1)
    return n


def prepare(n, call):
    n.x.add_(1), n.y.add_(1)
    n.event.record()
    if call.startswith("work"):
        n.work = dist.all_reduce(n.x, async_op=True)


def perform(n, call):
    result = eval(call, vars(n))
    while "query()" in call and not result:
        result = eval(call, vars(n))


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize("call", ROWS)
def test_call_of_the_table_waits_on_the_host_as_listed(call, runs_ahead):
    waits, _ = ROWS[call]
    n = names()
    if not call.startswith("work"):
        eval(call, vars(n))  # a first call may wait
    n = names()
    if not waits:
        runs_ahead(lambda: (prepare(n, call), eval(call, vars(n))))
        return
    with openreg.testing.gate() as gate:
        gate.wait(n.stream)
        thread = threading.Thread(target=lambda: (prepare(n, call), eval(call, vars(n))))
        thread.start()
        thread.join(0.1)
        assert thread.is_alive(), "the call returned before its stream was done"
    thread.join()


@pytest.mark.usefixtures("group", "watching")
@pytest.mark.parametrize("call", sorted(set(ROWS) - {BETWEEN}))
def test_call_of_the_table_orders_streams_as_listed(call):
    _, orders = ROWS[call]

    def use():
        n = names()
        prepare(n, call)
        perform(n, call)
        if "all_reduce" in call or "work" in call:  # with the current stream
            n.x.mul_(2)
        else:
            with n.side:
                n.y.mul_(2)
        openreg.synchronize()

    reports = found(use)
    assert any(report.startswith("aten::mul_") for report in reports) == (not orders), reports


def test_copy_between_devices_orders_their_streams():
    assert ROWS[BETWEEN] == (False, True)
    n = names()
    other = openreg.current_stream(1)
    with openreg.testing.gate() as gate:
        gate.wait(n.stream)
        eval(BETWEEN, vars(n))
        assert not other.query()
    with openreg.testing.gate(1) as gate:
        gate.wait(other)
        eval(BETWEEN, vars(n))
        assert not n.stream.query()
    openreg.synchronize(1)


def test_order_table_has_at_least_thirty_rows():
    assert len(ROWS) >= 30
