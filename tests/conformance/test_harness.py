"""That differences are seen: a comparison that passes everything would never be noticed."""

import json
from dataclasses import asdict
from types import SimpleNamespace

import comparison
import declared
import jobs
import pytest
import torch
from comparison import Outcome, attempt, compare, differences
from declared import Declared, judge
from jobs import ERRORS, Job, Pool
from sweep import earlier


def sample(x, *args):
    return SimpleNamespace(input=x, args=args, kwargs={}, output_process_fn_grad=lambda out: out)


SAMPLE = sample(torch.arange(6.0).reshape(2, 3).t().requires_grad_())


def wrong_on_device(wrong):
    """An operator that is right on the CPU alone."""
    return lambda x: x * 2 if x.is_cpu else wrong(x)


def kinds(function, grad=True):
    return {kind for kind, _ in compare("op", function, SAMPLE, grad)}


def fail(x):
    raise IndexError("no")


class Half(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, grad):
        return grad


@pytest.mark.parametrize(
    "wrong, kind",
    [
        (lambda x: x * 2 + 1e-4, "values"),
        (lambda x: (x * 2).double(), "dtype"),
        (lambda x: (x * 2)[:, :1], "shape"),
        (lambda x: (x * 2).contiguous(), "strides"),
        (lambda x: (x * 2).cpu(), "device"),
        (lambda x: (x * 2).detach(), "requires_grad"),
        (lambda x: (x * 2,), "structure"),
        (lambda x: x.detach().mul_(2).requires_grad_(), "aliases"),
        (lambda x: (x.detach().add_(1), x * 2 - 2)[1], "argument's values"),
        (lambda x: torch._neg_view(x * -2), "neg"),
        (Half.apply, "gradient's values"),
        (fail, "error"),
    ],
)
def test_difference_of_each_kind_is_found(wrong, kind):
    assert kind in kinds(wrong_on_device(wrong))


def test_equal_results_have_no_difference():
    assert kinds(lambda x: x * 2) == set()


def test_drivers_results_may_be_nearer_to_the_exact_ones(monkeypatch):
    def nearer(x):
        return x + 1e9 - 1e9 if x.is_cpu else x + 0

    for own, found in ((False, {"values"}), (True, set())):
        monkeypatch.setattr(comparison, "OWN_KERNELS", own)
        assert kinds(nearer) == found
        assert kinds(wrong_on_device(lambda x: x * 2 + 1e-4)) == {"values"}


def test_second_call_is_compared_too():
    calls = []

    def later(x):
        calls.append(x.device.type)
        return x * 2 + (calls[-2:] == ["openreg", "openreg"])

    assert kinds(later) == {"values"}


def test_errors_are_compared_by_type_and_text():
    assert kinds(lambda x: fail(x) if x.is_cpu else x) == {"no error"}
    assert kinds(lambda x: fail(x) if x.is_cpu else x.view(-5, 7)) == {"error type"}
    other = Outcome(error=IndexError("other"))
    assert next(differences(other, attempt(fail, SAMPLE, "cpu", False)))[0] == "message"
    queued = IndexError("no\n  raised by x on openreg:0, queued earlier")
    assert not list(differences(Outcome(error=queued), Outcome(error=IndexError("no"))))


def test_random_numbers_must_repeat_where_they_cannot_agree():
    assert kinds(lambda x: x.detach().bernoulli(0.5), grad=False) == set()
    state = iter(range(100))

    def unseeded(x):
        torch.manual_seed(next(state))
        return torch.rand_like(x)

    assert kinds(unseeded, grad=False) == {"determinism"}


def test_arguments_keep_strides_offsets_and_shared_memory():
    base = torch.arange(12.0)
    x, y = base[2:8].view(2, 3).t(), base.expand(2, 12)
    seen = attempt(lambda a, b: (a.add_(1), b), sample(x, y), "openreg", False)
    a, b = seen.arguments
    assert (a.stride(), a.storage_offset(), b.stride()) == (x.stride(), 2, (0, 1))
    assert b[0].tolist() == [0, 1, 3, 4, 5, 6, 7, 8, 8, 9, 10, 11]
    assert base.tolist() == list(range(12)), "the sample itself is as it was"


@pytest.mark.slow
def test_compiled_job_is_compared():
    with Pool(1) as pool:
        result = pool.submit(Job("sin", "float32", 1, compiled=True)).result()
    assert (result["count"], result["failures"]) == (1, {})


@pytest.mark.slow
def test_crash_and_hang_cost_one_job(monkeypatch):
    with Pool(1) as pool:
        assert (
            "KeyError"
            in pool.submit(Job("no such operator", "float32")).result()["failures"]["crash"]
        )
        assert pool.submit(Job("add", "float32", 1)).result()["failures"] == {}
        monkeypatch.setattr(jobs, "LIMIT", 0.001)
        assert "hang" in pool.submit(Job("sort", "float32")).result()["failures"]


def test_operator_list_is_kept_until_its_stamp_changes(monkeypatch, tmp_path):
    made = []
    monkeypatch.setattr(jobs, "_list_operators", lambda: made.append(1) or '{"add": {}}')
    for stamp, text, count in (("a", None, 1), ("a", None, 1), ("b", None, 2), ("b", "b\n{", 3)):
        if text:
            (tmp_path / "operators.json").write_text(text)  # killed while it wrote
        monkeypatch.setattr(jobs, "_stamp", lambda stamp=stamp: stamp)
        assert jobs.operators(tmp_path) == {"add": {}}
        assert len(made) == count


def test_sweep_that_was_stopped_goes_on(tmp_path):
    done, other = Job("add", "float32"), Job("add", "float32", compiled=True)
    path = tmp_path / "results"
    path.write_text(json.dumps([asdict(done), {"count": 3}]) + "\n" + '[{"op": "ad')
    assert earlier(path, [other, done]) == {done: {"count": 3}}
    assert earlier(path, [other]) == earlier(tmp_path / "none", [done]) == {}


def test_undeclared_and_stale_differences_fail(monkeypatch):
    job = Job("add", "float32")
    monkeypatch.setattr(declared, "DECLARED", (Declared("add", "float32", "strides", "why"),))
    assert judge(job, {"failures": {"strides": "1"}}) == []
    assert judge(job, {"failures": {"strides": "1", "values": "2"}}) == ["values: 2"]
    (stale,) = judge(job, {"failures": {}})
    assert "does not occur: strides (why)" in stale
    assert judge(Job("add", ERRORS), {"failures": {}}) == []
    assert judge(Job("add", "float32", compiled=True), {"failures": {"strides": "1"}}) != []
