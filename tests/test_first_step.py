"""Nothing in a first training step waits for the device."""

import pathlib

import pytest

PROGRAM = pathlib.Path(__file__).with_name("first_step.py").read_text()
MODELS = ["mlp", "conv", "transformer", "lstm"]
OPTIMIZERS = ["sgd", "adam", "adamw", "rmsprop", "adagrad", "adadelta"]
STEPS = [(model, "sgd") for model in MODELS] + [("mlp", name) for name in OPTIMIZERS[1:]]


@pytest.mark.parametrize(("model", "optimizer"), STEPS)
def test_the_first_step_runs_ahead(model, optimizer, run_ok):
    code = f"import sys; sys.argv[1:] = [{model!r}, {optimizer!r}]\n{PROGRAM}"
    assert run_ok(code) == ""
