"""Trains one model that is split over two devices, the front half on one, the back on the other.

Activations cross from the first device to the second in forward, gradients the other way in
backward; autograd does that by itself, and nothing here waits for either device but the reading of
the loss. The data are the scanned 8x8 digits that ship with scikit-learn.

    python docs/examples/two_devices.py [--devices openreg:0 openreg:1] [--epochs 10]

The exit status is 1 if the model does not learn.
"""

import argparse
import sys

import torch
from sklearn.datasets import load_digits
from torch import nn

REQUIRED_ACCURACY = 0.9
BATCH_SIZE = 64
TEST_SIZE = 360


class SplitModel(nn.Module):
    def __init__(self, first, second):
        super().__init__()
        self.first, self.second = first, second
        self.front = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU())
        self.back = nn.Sequential(nn.Linear(128, 64), nn.ReLU(), nn.Linear(64, 10))
        self.front.to(first)
        self.back.to(second)

    def forward(self, images):
        hidden = self.front(images.to(self.first))
        return self.back(hidden.to(self.second))


def load_split():
    digits = load_digits()
    images = torch.tensor(digits.data, dtype=torch.float32) / 16
    labels = torch.tensor(digits.target)
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
    return images[order], labels[order]


def train_epoch(model, optimizer, images, labels):
    """Returns the mean loss."""
    losses = []
    for chosen in torch.randperm(len(images)).split(BATCH_SIZE):
        loss = nn.functional.cross_entropy(model(images[chosen]), labels[chosen].to(model.second))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return torch.stack(losses).mean().item()


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--devices", nargs=2, default=["openreg:0", "openreg:1"])
    parser.add_argument("--epochs", type=int, default=10)
    options = parser.parse_args()
    torch.manual_seed(0)
    images, labels = load_split()
    model = SplitModel(*map(torch.device, options.devices))
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    losses = []
    for epoch in range(options.epochs):
        losses.append(train_epoch(model, optimizer, images[TEST_SIZE:], labels[TEST_SIZE:]))
        print(f"epoch {epoch + 1:2}: loss {losses[-1]:.4f}")
    with torch.no_grad():
        predicted = model(images[:TEST_SIZE]).argmax(dim=1).cpu()
    accuracy = (predicted == labels[:TEST_SIZE]).double().mean().item()
    print(f"test accuracy {accuracy:.2%} with the model on {' and '.join(options.devices)}")
    if accuracy < REQUIRED_ACCURACY or not losses[-1] < losses[0]:
        print("the model did not learn", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
