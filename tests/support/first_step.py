"""First training steps behind a closed gate, each in a process of its own: prints what waited.

The arguments are names of models and optimizers, as in `mlp+sgd`. The processes are forks, because
the first optimizer of a process imports PyTorch's compiler, which takes longer than all steps.
"""

import json
import os
import sys
import threading
import traceback

import torch
import torch._dynamo
import torch.nn.functional as F
from torch import nn

DEVICE = "openreg"


class Last(nn.Module):
    """An LSTM's last output."""

    def __init__(self):
        super().__init__()
        self.lstm, self.head = nn.LSTM(8, 16, num_layers=2, batch_first=True), nn.Linear(16, 4)

    def forward(self, x):
        return self.head(self.lstm(x)[0][:, -1])


def mlp():
    return nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Dropout(0.1), nn.Linear(32, 4))


def conv():
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(8, 8, 3, stride=2, groups=2, bias=False),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(8, 4),
    )


def transformer():
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    return nn.Sequential(
        nn.Embedding(10, 8), nn.TransformerEncoder(layer, 2), nn.Flatten(), nn.Linear(48, 4)
    )


MODELS = {
    "mlp": (mlp, lambda: torch.rand(5, 8)),
    "conv": (conv, lambda: torch.rand(5, 3, 12, 12)),
    "transformer": (transformer, lambda: torch.randint(10, (5, 6))),
    "lstm": (Last, lambda: torch.rand(5, 6, 8)),
}
OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
    "adam": lambda p: torch.optim.Adam(p, amsgrad=True),
    "adamw": lambda p: torch.optim.AdamW(p, fused=True),
    "rmsprop": lambda p: torch.optim.RMSprop(p, momentum=0.5, centered=True),
    "adagrad": lambda p: torch.optim.Adagrad(p),
    "adadelta": lambda p: torch.optim.Adadelta(p, foreach=False),
}


def step(model, optimizer, x, y):
    loss = F.cross_entropy(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    return loss


def first_step(model, optimizer):
    """What waited for the device."""
    torch.manual_seed(0)
    make, batch = MODELS[model]
    model = make().to(DEVICE)
    optimizer = OPTIMIZERS[optimizer](model.parameters())
    x, y = batch().to(DEVICE), torch.randint(4, (5,)).to(DEVICE)
    torch.openreg.synchronize()
    torch.openreg.fallback_stats(reset=True)
    losses = []
    stepper = threading.Thread(target=lambda: losses.append(step(model, optimizer, x, y)))
    with torch.openreg.testing.gate() as gate:
        gate.wait()
        stepper.start()
        stepper.join(60)
        waited = stepper.is_alive()
    stepper.join()
    assert losses[0].item() > 0
    stats = torch.openreg.fallback_stats().items()
    return ["the step"] * waited + [name for name, ways in stats if ways["waited"]["count"] != 0]


def in_fork(names):
    """Prints the names and what waited. The status is 1 if the step raises."""
    pid = os.fork()
    if pid:
        return os.waitpid(pid, 0)[1] != 0
    status = 1
    try:
        print(json.dumps([names, first_step(*names.split("+"))]), flush=True)
        status = 0
    except BaseException:
        traceback.print_exc()
    os._exit(status)


if __name__ == "__main__":
    sys.exit(max(in_fork(names) for names in sys.argv[1:]))
