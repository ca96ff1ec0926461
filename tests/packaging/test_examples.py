"""The examples and the README's program run as a reader would run them."""

import inspect
import re
from pathlib import Path

import pytest
from torch.distributed.fsdp._flat_param import FlatParamHandle

ROOT = Path(__file__).resolve().parents[2]
README = ROOT / "README.md"


@pytest.fixture
def example(run):
    """Runs a script of docs/examples."""
    return lambda name, *arguments: run("", arguments=[ROOT / "docs/examples" / name, *arguments])


@pytest.mark.slow
def test_digits_example_learns_on_both_devices(example):
    """Five epochs instead of fifteen: enough for the 97 % that the example itself demands."""
    done = example("digits.py", "--epochs", 5)
    assert done.code == 0, done.out + done.err
    row = r"^{}\s+(\d+\.\d+)%\s+\d+\.\d+ s\s+{}$"
    device = re.search(row.format("openreg:1", r"(\d+\.\d+) MiB"), done.out, re.M)
    cpu = re.search(row.format("cpu", "-"), done.out, re.M)
    assert device and cpu, done.out
    assert float(device[1]) >= 97 and float(cpu[1]) >= 97
    assert float(device[2]) > 0
    assert "train on openreg:1: 100%" in done.err


@pytest.mark.slow
def test_digits_example_fails_when_it_has_not_learnt(example):
    done = example("digits.py", "--device", "cpu", "--epochs", 1)
    assert done.code == 1
    assert "below 97%" in done.err


@pytest.mark.slow
def test_digits_ppe_example_learns(example):
    done = example("digits_ppe.py", "--epochs", 10)
    assert done.code == 0, done.out + done.err
    (reached,) = re.findall(r"^test accuracy on openreg:1: (\d+\.\d+)%$", done.out, re.M)
    assert float(reached) >= 97
    losses = [float(loss) for loss in re.findall(r"^\S*\d+ +(\d\S*)", done.out, re.M)]
    assert len(losses) == 10 and losses[-1] < losses[0] / 4


@pytest.mark.slow
def test_digits_ppe_example_fails_when_it_has_not_learnt(example):
    done = example("digits_ppe.py", "--epochs", 1)
    assert done.code == 1
    assert "below 97%" in done.err


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    ["parameter_server.py", "weight_update.py", "actor_learner.py", "loader.py", "shared_ranks.py"],
)
def test_sharing_examples_run(example, name):
    done = example(f"sharing/{name}")
    assert (done.code, done.err) == (0, ""), done.out + done.err


@pytest.mark.slow
def test_two_devices_example_learns(example):
    done = example("two_devices.py")
    assert done.code == 0, done.out + done.err
    losses = [float(loss) for loss in re.findall(r"loss (\d+\.\d+)", done.out)]
    assert len(losses) == 10 and losses[-1] < losses[0] / 4
    assert "openreg:0 and openreg:1" in done.out


@pytest.mark.slow
def test_two_devices_example_fails_when_it_has_not_learnt(example):
    done = example("two_devices.py", "--devices", "cpu", "cpu", "--epochs", 1)
    assert done.code == 1
    assert "did not learn" in done.err


def test_readme_program_runs_without_warnings(run):
    (program,) = re.findall(r"## Ten lines.*?```python\n(.*?)```", README.read_text(), re.S)
    assert len([line for line in program.splitlines() if line]) <= 10
    done = run("", arguments=["-W", "error", "-c", program])
    assert done.code == 0, done.err
    float(done.out.strip().removeprefix("tensor(").removesuffix(")"))


def pytorch_records():
    """Whether FSDP calls record_stream() where it drops a weight, as it does from 2.15 on."""
    drops = FlatParamHandle._use_sharded_flat_param
    return "_no_dispatch_record_stream(" in inspect.getsource(drops)


def test_fsdp_race_example_is_reported(example):
    if pytorch_records():
        return check_fsdp_is_right(example)
    done = example("fsdp_race.py")
    assert done.code == 0 and "races reported: 1\n" in done.out, done.err
    missing = "Call record_stream() on the tensor, with the default stream, after"
    assert missing in " ".join(done.err.split()) and "_flat_param.py:" in done.err


def test_fsdp_race_example_with_record_stream_is_right(example):
    check_fsdp_is_right(example, "--mended")


def check_fsdp_is_right(example, *options):
    done = example("fsdp_race.py", *options)
    assert done.out.count("weight: right\n") == 3 and "races reported: 0\n" in done.out
    assert (done.code, done.err) == (0, "")


@pytest.mark.slow
def test_offload_race_example_is_reported(example):
    done = example("offload_race.py")
    assert done.code == 0 and "races reported: 0" not in done.out, done.out
    assert "record_stream" in done.err and "weights" in done.err
    done = example("offload_race.py", "--mended")
    assert (done.out, done.err) == ("product: right\nraces reported: 0\n", "")
