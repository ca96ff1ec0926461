"""``python -m torch_openreg demo``: finds the race in a training loop, and none in the corrected
one."""

import contextlib
import inspect
import sys
import textwrap

import torch
from torch import nn

from .openreg import _messages, sanitizer
from .openreg._utils import OWN_MODULE, OWN_NAME
from .openreg.testing import explore

STEPS = 8
SCHEDULES = 20


def batches():
    """STEPS batches in pinned memory: eight numbers, and the sum of their squares."""
    numbers = torch.randn(STEPS, 64, 8, generator=torch.Generator().manual_seed(0))
    return list(zip(numbers.pin_memory(), numbers.square().sum(-1, True).pin_memory(), strict=True))


def make_model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 1)).to(OWN_NAME)


def train(data, waits):
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    compute, copies = torch.accelerator.current_stream(), torch.Stream(device=OWN_NAME)
    for inputs, targets in data:
        with copies:  # while the step before is still being computed
            x = inputs.to(OWN_NAME, non_blocking=True)
            y = targets.to(OWN_NAME, non_blocking=True)
        if waits:
            compute.wait_stream(copies)
        loss = nn.functional.mse_loss(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        for tensor in (x, y):
            tensor.record_stream(compute)
    return loss.item()


def _say(text=""):
    print(text, flush=True)


def _show_loop():
    lines, first = inspect.getsourcelines(train)
    _say(f"A training loop copies its batches on a stream of their own ({__file__}):\n")
    for number, line in enumerate(lines, first):
        _say(f"  {number:3}  {line.rstrip()}")


def _seek(data, waits):
    """Returns the reports of one run under the sanitizer, and the results of many schedules."""
    with sanitizer.enable():
        with contextlib.suppress(sanitizer.DataRaceError):
            train(data, waits)
        reports = sanitizer.reports()
        torch.accelerator.synchronize()
        sanitizer.clear()
    return reports, explore(lambda: train(data, waits), SCHEDULES)


def _show(reports, found):
    for report in reports:
        _say(report.text(colour=_messages.wants_colour(sys.stdout)))
        _say("\n" + textwrap.indent(report.picture(), "  "))
    if not reports:
        _say(f"The sanitizer: nothing to report of {STEPS} steps on {OWN_NAME}:0.")
    _say()
    _say(f"{OWN_MODULE}.testing.explore:\n{found}")


def main():
    """Returns the exit status: 1 if the race was missed, or one was found where there is none."""
    data = batches()
    _show_loop()
    _say("\nWithout the wait (waits=False), which on most days trains all the same:\n")
    races, different = _seek(data, waits=False)
    _show(races, different)
    _say("\nWith the wait (waits=True):\n")
    false_reports, same = _seek(data, waits=True)
    _show(false_reports, same)
    if not races or different.ok or false_reports or not same.ok:
        print("\nThe demo expected the race in the first loop only.", file=sys.stderr)
        return 1
    _say(
        "\nYour own script:  python -m torch_openreg run --sanitize --seeds 20 script.py"
        "\nYour tests:       pytest --openreg-sanitizer, and --openreg-schedules=20"
    )
    return 0
