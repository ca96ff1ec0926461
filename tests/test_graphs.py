"""Graphs, by way of torch.openreg.graph and torch.accelerator.Graph."""

import gc
import threading

import pytest
import torch
from torch import nn

DEVICE = "openreg"


def captured(step, warmups=0):
    """The graph of a step, and what that returned. It has run `warmups` times."""
    side = torch.openreg.Stream()
    side.wait_stream(torch.openreg.current_stream())
    with torch.openreg.stream(side):
        for _ in range(warmups):
            step()
    torch.openreg.current_stream().wait_stream(side)
    graph = torch.openreg.Graph()
    with torch.openreg.graph(graph):
        result = step()
    return graph, result


def copies(tensors):
    return [t.detach().cpu().clone() for t in tensors]


# ---- Values -------------------------------------------------------------------------------------


def mlp():
    return nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4)), (8, 16)


def convolutions():
    layers = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(288, 4)
    return nn.Sequential(*layers), (4, 3, 8, 8)


def transformer():
    return nn.TransformerEncoderLayer(16, 2, 32, dropout=0.3, batch_first=True), (2, 6, 16)


class LSTM(nn.LSTM):
    def forward(self, x):
        return super().forward(x)[0]


def lstm():
    return LSTM(8, 12, num_layers=2, dropout=0.2, batch_first=True), (3, 5, 8)


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def adam(parameters):
    return torch.optim.Adam(parameters, lr=0.01, capturable=True)


class Training:
    """A model that is trained on batches, each of which is copied to the same place."""

    def __init__(self, make, optimizer, clip=False):
        torch.manual_seed(0)
        model, shape = make()
        self.model = model.to(DEVICE)
        self.x = torch.zeros(shape, device=DEVICE)
        self.optimizer = optimizer(self.model.parameters())
        self.clip = clip

    def step(self):
        self.optimizer.zero_grad(set_to_none=True)
        loss = self.model(self.x).square().mean()
        loss.backward()
        if self.clip:
            nn.utils.clip_grad_norm_(self.model.parameters(), 0.1)
        self.optimizer.step()
        return loss

    def run(self, count, advance):
        """What each of the steps leaves behind."""
        generator = torch.Generator().manual_seed(3)
        for _ in range(count):
            self.x.copy_(torch.randn(self.x.shape, generator=generator))
            loss = advance()
            yield copies([loss, *self.model.state_dict().values()])


@pytest.mark.parametrize("clip", [False, True])
@pytest.mark.parametrize("optimizer", [sgd, adam])
@pytest.mark.parametrize("make", [mlp, convolutions, transformer, lstm])
def test_a_training_step_is_eagers_bit_for_bit(make, optimizer, clip):
    eager = Training(make, optimizer, clip)
    graphed = Training(make, optimizer, clip)
    for training in eager, graphed:
        torch.manual_seed(1)
        for _ in range(3):
            training.step()
        if training is eager:
            expected = list(eager.run(100, eager.step))
    torch.manual_seed(1)
    graphed = Training(make, optimizer, clip)
    torch.manual_seed(1)
    graph, loss = captured(graphed.step, warmups=3)

    def replay():
        graph.replay()
        return loss

    for i, (values, wanted) in enumerate(zip(graphed.run(100, replay), expected, strict=True)):
        assert all(map(torch.equal, values, wanted)), f"replay {i} differs"
