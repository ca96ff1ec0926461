"""What a program does with the device: memory, copies, streams, training, and mistakes."""

import pytest
import torch
from torch import nn


def test_device_has_its_name():
    x = torch.ones(3, device="acme:0")
    assert (x.device.type, x.is_acme, torch.acme.is_available()) == ("acme", True, True)
    assert str(torch.acme.current_stream().device) == "acme:0"


def test_values_come_back():
    host = torch.arange(1000)
    assert torch.equal(host.to("acme").cpu(), host)
    assert torch.equal((host.to("acme") * 2).cpu(), host * 2)


def test_streams_are_ordered_by_events():
    side = torch.acme.Stream()
    x = torch.zeros(1000, device="acme")
    side.wait_stream(torch.acme.current_stream())
    with side:
        x += 1
    torch.acme.current_stream().wait_stream(side)
    assert x.sum().item() == 1000


def test_freed_memory_is_used_again():
    before = torch.acme.memory_allocated()
    for _ in range(100):
        torch.ones(2**20, device="acme")
    assert torch.acme.memory_allocated() == before


def test_errors_name_the_device():
    with pytest.raises(RuntimeError, match="acme device index 64"):
        torch.acme.synchronize(64)


def test_training_has_the_cpus_losses():
    def losses(device):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1)).to(device)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        inputs = torch.randn(32, 8).to(device)
        for _ in range(5):
            loss = nn.functional.mse_loss(model(inputs), inputs.sum(1, keepdim=True))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            yield loss.item()

    torch.testing.assert_close(list(losses("acme")), list(losses("cpu")))
