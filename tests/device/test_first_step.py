"""Nothing in a first training step waits for the device."""

import json
import pathlib

import pytest

PROGRAM = pathlib.Path(__file__).resolve().parents[1] / "support/first_step.py"
MODELS = ["mlp", "conv", "transformer", "lstm"]
OPTIMIZERS = ["sgd", "adam", "adamw", "rmsprop", "adagrad", "adadelta"]
STEPS = [f"{model}+sgd" for model in MODELS] + [f"mlp+{name}" for name in OPTIMIZERS[1:]]


@pytest.fixture(scope="module")
def waited(run_ok):
    lines = run_ok("", arguments=[PROGRAM, *STEPS]).splitlines()
    return dict(json.loads(line) for line in lines)


@pytest.mark.parametrize("names", STEPS)
def test_first_training_step_runs_ahead(names, waited):
    assert waited[names] == []
