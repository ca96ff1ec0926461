"""Trains the scanned digits of digits.py with pytorch-pfn-extras, on one openreg device.

Its trainer knows nothing of the device: torch_openreg.ppe, which their import registers, is a
runtime that moves the model and the batches. Batches wait in pinned memory and are copied on a
stream of their own while the device is busy with earlier ones (the option "prefetch").

    python docs/examples/digits_ppe.py [--device openreg:1] [--epochs 15]

The exit status is 1 if the test accuracy is below 97 %.
"""

import argparse
import sys
import tempfile

import pytorch_pfn_extras as ppe
import torch
from digits import BATCH_SIZE, REQUIRED_ACCURACY, load_split, make_model
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Classifier(nn.Module):
    """What the trainer trains: a model that gives its own loss, and whatever else is reported."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, images, labels):
        scores = self.model(images)
        correct = scores.detach().argmax(dim=1) == labels
        return {
            "loss": nn.functional.cross_entropy(scores, labels),
            "accuracy": correct.float().mean(),
        }


def make_loaders(seed):
    train, test = load_split(seed)
    order = torch.Generator().manual_seed(seed)
    return (
        DataLoader(
            TensorDataset(*train), BATCH_SIZE, shuffle=True, generator=order, pin_memory=True
        ),
        DataLoader(TensorDataset(*test), len(test[0]), pin_memory=True),
    )


def run(device, epochs, seed, folder):
    """Trains, prints a line for each epoch, and returns the last test accuracy."""
    torch.manual_seed(seed)
    runtime_options = {"prefetch": True}
    classifier = ppe.to(Classifier(make_model()), device, options=runtime_options)
    evaluator = ppe.engine.create_evaluator(
        classifier,
        device=device,
        runtime_options=runtime_options,
        options={"eval_report_keys": ["loss", "accuracy"]},
    )
    log = ppe.training.extensions.LogReport()
    columns = ["epoch", "train/loss", "val/loss", "val/accuracy", "elapsed_time"]
    trainer = ppe.engine.create_trainer(
        classifier,
        torch.optim.Adam(classifier.parameters(), lr=2e-3),
        epochs,
        extensions=[log, ppe.training.extensions.PrintReport(columns)],
        evaluator=evaluator,
        device=device,
        runtime_options=runtime_options,
        options={"train_report_keys": ["loss"]},
        out_dir=folder,
    )
    trainer.run(*make_loaders(seed))
    return log.log[-1]["val/accuracy"]


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="openreg:1")
    parser.add_argument("--epochs", type=int, default=15)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        accuracy = run(options.device, options.epochs, options.seed, folder)
    print(f"test accuracy on {options.device}: {accuracy:.2%}")
    if accuracy < REQUIRED_ACCURACY:
        print(f"test accuracy is below {REQUIRED_ACCURACY:.0%}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
