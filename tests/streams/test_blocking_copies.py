"""A blocking copy synchronises its stream, so that another stream may use what it has made.

Each program here moves a model or a batch and uses it on a side stream: right with blocking copies,
a race with non_blocking ones."""

import collections
import copy
import io
import threading

import numpy
import pytest
import torch
from race_pairs import DEVICE, found, openreg
from torch import nn

pytestmark = pytest.mark.usefixtures("watching")

OTHER = "openreg:1"
PROGRAMS = {}


def program(function):
    PROGRAMS[function.__name__.replace("_", " ")] = function
    return function


def on_side(function, *arguments, device=0):
    """Calls it on a side stream of its own, and waits for that."""
    side = openreg.Stream(device)
    with side:
        result = function(*arguments)
    side.synchronize()
    return result


def copied(blocks, host, *arguments, device=DEVICE):
    """The batch on the device."""
    return host.to(device, *arguments, non_blocking=not blocks)


def moved(blocks, module):
    return module.to(DEVICE, non_blocking=not blocks)


def batch(*sizes):
    return torch.arange(float(torch.Size(sizes or (8, 4)).numel())).reshape(sizes or (8, 4))


def mlp():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))


# ---- A batch ----


@program
def batch_to_a_side_stream(blocks):
    x = copied(blocks, batch())
    return on_side(lambda: x * 2)


@program
def pinned_batch(blocks):
    x = copied(blocks, batch().pin_memory())
    return on_side(lambda: x * 2)


@program
def batch_of_a_megabyte(blocks):
    x = copied(blocks, batch(1 << 18))
    return on_side(lambda: x.sum())


@program
def cast_batch(blocks):
    x = copied(blocks, batch(), torch.bfloat16)
    return on_side(lambda: x * 2)


@program
def large_cast_batch(blocks):
    x = copied(blocks, batch(1 << 18), torch.float64)
    return on_side(lambda: x.sum())


@program
def transposed_batch(blocks):
    x = copied(blocks, batch()[:, ::2].t())
    return on_side(lambda: x @ x.t())


@program
def expanded_batch(blocks):
    x = torch.empty(8, 4, device=DEVICE)
    openreg.synchronize()
    x.copy_(batch(4).expand(8, 4), non_blocking=not blocks)
    return on_side(lambda: x.sum(0))


@program
def conjugated_batch(blocks):
    x = copied(blocks, torch.complex(batch(), batch()).conj())
    return on_side(lambda: x * x)


@program
def buffer_that_is_filled_again(blocks):
    x, results = torch.empty(8, 4, device=DEVICE), []
    for i in range(3):
        x.copy_(batch() + i, non_blocking=not blocks)
        results.append(on_side(lambda: x * 2))
    return torch.stack(results)


@program
def slice_of_a_buffer(blocks):
    x = torch.zeros(8, 4, device=DEVICE)
    openreg.synchronize()
    x[2:6, 1:].copy_(batch(4, 3), non_blocking=not blocks)
    return on_side(lambda: x.sum())


@program
def list_of_batches(blocks):
    xs = [torch.zeros(3, device=DEVICE) for _ in range(3)]
    openreg.synchronize()
    torch._foreach_copy_(xs, [batch(3) + i for i in range(3)], non_blocking=not blocks)
    return on_side(lambda: torch.stack(xs).sum(0))


@program
def dictionary_of_batches(blocks):
    host = {"x": batch(), "y": {"z": batch(3)}}
    x, z = copied(blocks, host["x"]), copied(blocks, host["y"]["z"])
    return on_side(lambda: x.sum() + z.sum())


@program
def tensor_of_a_list(blocks):
    values = [1.0, 2.0, 3.0]
    x = torch.tensor(values, device=DEVICE) if blocks else copied(False, torch.tensor(values))
    return on_side(lambda: x * 2)


@program
def tensor_of_an_array(blocks):
    array = numpy.arange(6.0)
    x = torch.as_tensor(array, device=DEVICE) if blocks else copied(blocks, torch.as_tensor(array))
    return on_side(lambda: x * 2)


@program
def indices(blocks):
    table = torch.arange(10.0, device=DEVICE)
    openreg.synchronize()
    where = copied(blocks, torch.tensor([3, 1, 4]))
    return on_side(lambda: table[where])


@program
def mask(blocks):
    x = torch.ones(4, device=DEVICE)
    openreg.synchronize()
    there = copied(blocks, torch.tensor([True, False, True, False]))
    return on_side(lambda: x.masked_fill(there, 7))


@program
def two_side_streams(blocks):
    x = copied(blocks, batch())
    return on_side(lambda: x * 2) + on_side(lambda: x * 3)


@program
def from_a_side_stream_to_the_current_one(blocks):
    side = openreg.Stream()
    with side:
        x = copied(blocks, batch())
    y = x * 2
    openreg.synchronize()
    return y


@program
def from_another_thread(blocks):
    result = []

    def load():
        with openreg.Stream():
            result.append(copied(blocks, batch()))

    thread = threading.Thread(target=load)
    thread.start()
    thread.join()
    return on_side(lambda: result[0] * 2)


@program
def another_device(blocks):
    x = copied(blocks, batch(), device=OTHER)
    return on_side(lambda: x * 2, device=1)


@program
def loader(blocks):
    rows = torch.utils.data.TensorDataset(batch(), batch())
    total = []
    for x, _y in torch.utils.data.DataLoader(rows, batch_size=4, pin_memory=not blocks):
        there = copied(blocks, x)
        total.append(on_side(lambda t=there: t.sum()))
    return torch.stack(total)


@program
def sparse_batch(blocks):
    x = copied(blocks, torch.eye(4).to_sparse())
    return on_side(lambda: x.values() * 2)


@program
def sparse_matrix(blocks):
    x = copied(blocks, torch.eye(4).to_sparse_csr())
    # A product would follow indices that have not been written yet.
    return on_side(lambda: x.crow_indices().sum() + x.col_indices().sum() + x.values().sum())


# ---- A model ----


@program
def model(blocks):
    x = batch().to(DEVICE)
    there = moved(blocks, mlp())
    return on_side(lambda: there(x))


@program
def model_and_batch(blocks):
    there, x = moved(blocks, mlp()), copied(blocks, batch())
    return on_side(lambda: there(x))


@program
def model_in_half_precision(blocks):
    x = batch().to(DEVICE, torch.bfloat16)
    there = mlp().to(DEVICE, torch.bfloat16, non_blocking=not blocks)
    return on_side(lambda: there(x))


@program
def buffers(blocks):
    x = batch().to(DEVICE)
    there = moved(blocks, nn.BatchNorm1d(4).eval())
    return on_side(lambda: there(x))


@program
def state_that_is_loaded(blocks):
    there, state = mlp().to(DEVICE), mlp().state_dict()
    if blocks:
        there.load_state_dict(state)
    else:
        with torch.no_grad():
            for name, parameter in there.named_parameters():
                parameter.copy_(state[name], non_blocking=True)
    return on_side(lambda: there(torch.ones(2, 4, device=DEVICE)))


@program
def file_that_is_loaded(blocks):
    file = io.BytesIO()
    torch.save(mlp().state_dict(), file)
    file.seek(0)
    if blocks:
        state = torch.load(file, map_location=DEVICE)
    else:
        state = {name: copied(False, value) for name, value in torch.load(file).items()}
    return on_side(lambda: sum(value.sum() for value in state.values()))


@program
def step_of_training(blocks):
    there, x = moved(blocks, mlp()), copied(blocks, batch())
    optimizer = torch.optim.AdamW(there.parameters())

    def step():
        there(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        return there(x).detach()

    return on_side(step)


@program
def state_of_an_optimizer(blocks):
    there = mlp().to(DEVICE)
    optimizer = torch.optim.SGD(there.parameters(), lr=0.1, momentum=0.9)
    for parameter in there.parameters():
        state = {"momentum_buffer": copied(blocks, torch.ones(parameter.shape))}
        optimizer.state[parameter] = collections.defaultdict(lambda: None, state)

    def step():
        there(torch.ones(2, 4, device=DEVICE)).sum().backward()
        optimizer.step()
        return there[0].weight.detach().clone()

    return on_side(step)


@program
def copy_of_a_model(blocks):
    x = batch().to(DEVICE)
    there = moved(blocks, copy.deepcopy(mlp()))
    return on_side(lambda: torch.func.functional_call(there, dict(there.named_parameters()), (x,)))


def test_blocking_copy_programs_are_at_least_thirty():
    assert len(PROGRAMS) >= 30


@pytest.mark.parametrize("name", PROGRAMS)
def test_blocking_copy_is_not_reported(name):
    for _ in range(2):  # known operators too
        assert found(PROGRAMS[name], True) == []


@pytest.mark.parametrize("name", PROGRAMS)
def test_missing_wait_of_a_non_blocking_copy_is_reported(name):
    reports = found(PROGRAMS[name], False)
    assert any(report.endswith("/ aten::copy_") for report in reports), reports


@pytest.mark.parametrize("name", PROGRAMS)
def test_blocking_copy_has_one_result_under_every_seed(name):
    def main():
        return PROGRAMS[name](True).cpu()

    assert openreg.testing.explore(main, 4, progress=False).ok
