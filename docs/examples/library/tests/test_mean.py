import torch
from overlap import Mean


def test_mean_of_temporaries(device):
    mean = Mean((1000,), device)
    x = torch.zeros(1000, device=device)
    for i in range(4):
        x += 1
        mean.add(x * i)  # the product is freed when add() returns
        y = x + i  # may get its memory
    assert y.sum().item() == 7000
    assert mean.result().tolist() == [(0 + 2 + 6 + 12) / 4] * 1000


def test_results_in_between(device):
    mean = Mean((1000,), device)
    mean.add(torch.ones(1000, device=device))
    double = mean.result() * 2
    triple = mean.result() * 3
    mean.add(torch.full((1000,), 3.0, device=device))
    assert (double[0].item(), triple[0].item(), mean.result()[0].item()) == (2, 3, 2)
