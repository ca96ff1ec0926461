"""Optimizers step as on the CPU: parameters, state, and what a step returns."""

import copy
import inspect
import io

import pytest
import torch
import torch.nn.functional as F
from cpu_reference import DEVICE, alike, drawn
from torch import nn
from torch.optim import lr_scheduler, swa_utils

import torch_openreg  # noqa: F401

# SparseAdam takes sparse gradients alone.
OPTIMIZERS = {
    name: kind
    for name, kind in vars(torch.optim).items()
    if inspect.isclass(kind) and issubclass(kind, torch.optim.Optimizer)
    if name not in ("Optimizer", "SparseAdam")
}
OPTIONS = {
    "maximize": True,
    "nesterov": True,
    "amsgrad": True,
    "centered": True,
    "momentum": 0.9,
    "weight_decay": 0.01,
    "decoupled_weight_decay": True,
    "line_search_fn": "strong_wolfe",
}


def options(kind):
    known = inspect.signature(kind).parameters
    single = [{name: value} for name, value in OPTIONS.items() if name in known]
    for choice in single:
        if "nesterov" in choice and "momentum" in known:
            choice["momentum"] = 0.9
    # By default a list of parameters is stepped in one call on this device, one by one on the CPU.
    ways = [{}, {"fused": True}] if "fused" in known else [{}]
    alone = [{"foreach": choice} for choice in (False, True) if "foreach" in known]
    return alone + [{**way, **choice} for way in ways for choice in ({}, *single)]


def having(option):
    return [n for n, kind in OPTIMIZERS.items() if option in inspect.signature(kind).parameters]


def new_net(device, bias=True):
    return nn.Sequential(nn.Linear(6, 8, bias), nn.Tanh(), nn.Linear(8, 3, bias)).to(device)


def steps(device, optimizer, net, count=4):
    x, y = drawn(device, 4, 6).detach(), drawn(device, 4, 3).detach()

    def closure():
        optimizer.zero_grad()
        loss = F.mse_loss(net(x), y)
        loss.backward()
        return loss

    losses = [optimizer.step(closure).detach() for _ in range(count)]
    state = [
        {key: value.cpu().tolist() if torch.is_tensor(value) else value for key, value in s.items()}
        for s in optimizer.state_dict()["state"].values()
        if "al" not in s  # LBFGS keeps lists of tensors, as long as its history
    ]
    return losses, [p.detach() for p in net.parameters()], state


def close(state):
    """Numbers in lists, as one tensor, for a comparison with a tolerance."""
    numbers = []

    def collect(value):
        if isinstance(value, list | tuple):
            for item in value:
                collect(item)
        elif isinstance(value, dict):
            collect([value[key] for key in sorted(value)])
        elif isinstance(value, float | int):
            numbers.append(float(value))

    collect(state)
    return numbers


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizer_steps_as_on_the_cpu_with_every_option(name):
    for choice in options(OPTIMIZERS[name]):

        def program(device, choice=choice):
            net = new_net(device, bias=name != "Muon")
            optimizer = OPTIMIZERS[name](net.parameters(), **choice)
            losses, parameters, state = steps(device, optimizer, net)
            return losses, parameters, close(state)

        alike(program)


@pytest.mark.parametrize("foreach", [False, True], ids=["", "foreach"])
@pytest.mark.parametrize("name", having("capturable"))
def test_capturable_optimizer_steps_as_the_cpus(name, foreach):
    """The CPU has no such option: its steps without are what is to come out."""

    def program(device):
        net = new_net(device)
        capturable = device != "cpu"
        lr = torch.tensor(0.01, device=device) if capturable else 0.01
        kind = OPTIMIZERS[name]
        optimizer = kind(net.parameters(), lr=lr, capturable=capturable, foreach=foreach)
        losses, parameters, _ = steps(device, optimizer, net)
        return losses, parameters

    alike(program)


@pytest.mark.parametrize("name", having("capturable"))
def test_capturable_optimizer_step_never_waits(name, runs_ahead):
    with torch.accelerator.device_index(torch.device(DEVICE).index):
        net = new_net(DEVICE)
        optimizer = OPTIMIZERS[name](net.parameters(), capturable=True, foreach=True)
        for p in net.parameters():
            p.grad = torch.ones_like(p)
        for _ in range(3):
            optimizer.step()
        torch.openreg.synchronize()
        runs_ahead(optimizer.step)


@pytest.mark.parametrize("name", having("differentiable"))
def test_differentiable_optimizer_has_the_cpus_gradient(name):
    def program(device):
        start = drawn(device, 5, 4, dtype=torch.float64)
        weight = start.clone()
        weight.retain_grad()
        optimizer = OPTIMIZERS[name]([weight], lr=0.1, differentiable=True)
        weight.grad = start * 2 + 1
        optimizer.step()
        return weight, torch.autograd.grad(weight.square().sum(), start)

    alike(program)


def test_lbfgs_finds_a_minimum():
    def program(device):
        w = torch.tensor([-1.0, 2.0], device=device, requires_grad=True)
        optimizer = torch.optim.LBFGS([w], line_search_fn="strong_wolfe", max_iter=30)

        def closure():
            optimizer.zero_grad()
            loss = (1 - w[0]) ** 2 + 10 * (w[1] - w[0] ** 2) ** 2
            loss.backward()
            return loss

        for _ in range(5):
            optimizer.step(closure)
        return w

    torch.testing.assert_close(alike(program).cpu(), torch.ones(2))


SCHEDULERS = {
    "StepLR": {"step_size": 2},
    "OneCycleLR": {"max_lr": 0.1, "total_steps": 10},
    "CosineAnnealingWarmRestarts": {"T_0": 3},
    "ReduceLROnPlateau": {"patience": 1},
    "CyclicLR": {"base_lr": 0.01, "max_lr": 0.1, "step_size_up": 2},
}


@pytest.mark.parametrize("tensor", [False, True], ids=["", "lr-on-the-device"])
@pytest.mark.parametrize("name", SCHEDULERS)
def test_scheduler_sets_the_cpus_rates(name, tensor):
    def program(device):
        net = new_net(device)
        lr = torch.tensor(0.1, device=device) if tensor else 0.1
        optimizer = torch.optim.SGD(net.parameters(), lr=lr, momentum=0.9, foreach=False)
        scheduler = getattr(lr_scheduler, name)(optimizer, **SCHEDULERS[name])
        rates = []
        for _ in range(4):
            (loss,), parameters, _ = steps(device, optimizer, net, count=1)
            scheduler.step(*([loss] if name == "ReduceLROnPlateau" else []))
            rates.append(float(optimizer.param_groups[0]["lr"]))
        return rates, parameters

    alike(program)


def test_averaged_models_have_the_cpus_parameters():
    def program(device):
        net = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3)).to(device)
        average = swa_utils.AveragedModel(net)
        moving = swa_utils.AveragedModel(net, multi_avg_fn=swa_utils.get_ema_multi_avg_fn(0.9))
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        batches = [torch.randn(4, 3) for _ in range(3)]
        for x in batches:
            optimizer.zero_grad()
            net(x.to(device)).square().sum().backward()
            optimizer.step()
            average.update_parameters(net)
            moving.update_parameters(net)
        swa_utils.update_bn(batches, average, device=torch.device(device))
        return list(average.parameters()), list(average.module.buffers()), list(moving.parameters())

    alike(program)


@pytest.mark.parametrize("foreach", [None, False, True])
def test_gradient_clipping_has_the_cpus_results(foreach):
    def program(device):
        net, results = new_net(device), []
        for norm in (2.0, 1.0, float("inf")):
            net.zero_grad()
            net(torch.ones(2, 6, device=device)).square().sum().backward()
            total = nn.utils.clip_grad_norm_(net.parameters(), 0.05, norm, foreach=foreach)
            results.append((total, [p.grad.clone() for p in net.parameters()]))
        nn.utils.clip_grad_value_(net.parameters(), 0.01, foreach=foreach)
        return results, [p.grad for p in net.parameters()]

    alike(program)


def test_optimizer_may_step_each_parameter_inside_backward():
    def program(device):
        net = new_net(device)
        optimizers = {p: torch.optim.Adam([p]) for p in net.parameters()}

        def step(p):
            optimizers[p].step()
            optimizers[p].zero_grad()

        for p in net.parameters():
            p.register_post_accumulate_grad_hook(step)
        for _ in range(3):
            net(torch.ones(2, 6, device=device)).square().sum().backward()
        return [p.detach() for p in net.parameters()]

    alike(program)


@pytest.mark.parametrize("name", ["SGD", "Adam", "Adagrad", "RMSprop"])
@pytest.mark.parametrize("first", ["cpu", DEVICE])
def test_optimizer_state_goes_on_at_another_device(name, first):
    """Two steps on one device, saved, and two on the other: as four on the CPU."""
    torch.manual_seed(0)
    net = new_net("cpu")
    nets = {"whole": net, "first": copy.deepcopy(net).to(first)}
    second = DEVICE if first == "cpu" else "cpu"
    nets["second"] = new_net(second)

    def make(which):
        return OPTIMIZERS[name](nets[which].parameters(), lr=0.05)

    def run(which, device, optimizer, count):
        for _ in range(count):
            optimizer.zero_grad()
            nets[which](torch.ones(2, 6, device=device)).square().sum().backward()
            optimizer.step()

    run("whole", "cpu", make("whole"), 4)
    optimizer = make("first")
    run("first", first, optimizer, 2)
    file = io.BytesIO()
    torch.save([nets["first"].state_dict(), optimizer.state_dict()], file)
    file.seek(0)
    weights, state = torch.load(file)
    nets["second"].load_state_dict(weights)
    optimizer = make("second")
    optimizer.load_state_dict(state)
    run("second", second, optimizer, 2)
    pairs = zip(nets["second"].parameters(), nets["whole"].parameters(), strict=True)
    for mine, theirs in pairs:
        torch.testing.assert_close(mine.detach().cpu(), theirs.detach(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", having("fused"))
def test_learning_rate_of_one_element_on_the_host_is_accepted(name):
    """Fused optimizers take it, as on CUDA, and read it at the call."""

    def program(device):
        net = new_net(device)
        rate = torch.tensor([0.1])
        optimizer = OPTIMIZERS[name](net.parameters(), lr=rate, fused=True)
        first = steps(device, optimizer, net, 2)
        rate.fill_(0.01)
        return first, steps(device, optimizer, net, 2)

    alike(program)
    parameter = nn.Parameter(torch.ones(4, device=DEVICE))
    rate = torch.tensor([0.1])
    optimizer = OPTIMIZERS[name]([parameter], lr=rate, fused=True)
    parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    torch.openreg.synchronize(parameter.device)
    alone = parameter.detach().clone().cpu()
    with torch.no_grad():
        parameter.fill_(1)
    optimizer = OPTIMIZERS[name]([parameter], lr=rate, fused=True)
    with torch.openreg.testing.gate(parameter.device) as gate:
        gate.wait()
        optimizer.step()
        rate.fill_(7)  # the step has its number
        assert not torch.openreg.current_stream(parameter.device).query()
    assert torch.equal(parameter.detach().cpu(), alone)
