"""torchmetrics on the device: step by step, and in the end, what it gives on the CPU."""

import copy
import pickle

import pytest
import torch
import torchmetrics
from ranks import Ranks
from torch.utils import _pytree

DEVICE = "openreg:1"
COUNT = 64
FIVE = {"task": "multiclass", "num_classes": 5}


def draw(kind):
    generator = torch.Generator().manual_seed(0)
    if kind == "classes":
        scores = torch.randn(COUNT, 5, generator=generator).softmax(-1)
        return scores, torch.randint(5, (COUNT,), generator=generator)
    if kind == "binary":
        return torch.rand(COUNT, generator=generator), torch.randint(
            2, (COUNT,), generator=generator
        )
    if kind == "numbers":
        return torch.randn(COUNT, generator=generator), torch.randn(COUNT, generator=generator)
    if kind == "images":
        return torch.rand(4, 3, 16, 16, generator=generator), torch.rand(
            4, 3, 16, 16, generator=generator
        )
    return (torch.randn(COUNT, generator=generator),)


def make_collection():
    return torchmetrics.MetricCollection(
        [
            torchmetrics.Accuracy(**FIVE),
            torchmetrics.Precision(**FIVE, average="macro"),
            torchmetrics.ConfusionMatrix(**FIVE),
        ]
    )


METRICS = {
    "accuracy": (lambda: torchmetrics.Accuracy(**FIVE), "classes"),
    "top3": (lambda: torchmetrics.Accuracy(**FIVE, top_k=3), "classes"),
    "auroc": (lambda: torchmetrics.AUROC(**FIVE), "classes"),
    "binary_auroc": (lambda: torchmetrics.AUROC(task="binary"), "binary"),
    "binned_auroc": (lambda: torchmetrics.AUROC(task="binary", thresholds=20), "binary"),
    "roc": (lambda: torchmetrics.ROC(task="binary"), "binary"),
    "average_precision": (lambda: torchmetrics.AveragePrecision(**FIVE), "classes"),
    "confusion_matrix": (lambda: torchmetrics.ConfusionMatrix(**FIVE), "classes"),
    "f1": (lambda: torchmetrics.F1Score(**FIVE, average="macro"), "classes"),
    "calibration_error": (lambda: torchmetrics.CalibrationError(task="binary"), "binary"),
    "mse": (torchmetrics.MeanSquaredError, "numbers"),
    "r2": (torchmetrics.R2Score, "numbers"),
    "pearson": (torchmetrics.PearsonCorrCoef, "numbers"),
    "spearman": (torchmetrics.SpearmanCorrCoef, "numbers"),
    "mean": (torchmetrics.MeanMetric, "one"),
    "cat": (torchmetrics.CatMetric, "one"),
    "psnr": (lambda: torchmetrics.image.PeakSignalNoiseRatio(data_range=1.0), "images"),
    "ssim": (lambda: torchmetrics.image.StructuralSimilarityIndexMeasure(data_range=1.0), "images"),
    "collection": (make_collection, "classes"),
}


def to_cpu(values):
    return _pytree.tree_map_only(torch.Tensor, torch.Tensor.cpu, values)


def measure(name, device):
    """The metric, its values for each part, and its value for all."""
    make, kind = METRICS[name]
    metric = make().to(device)
    parts = zip(*(values.chunk(4) for values in draw(kind)), strict=True)
    steps = [metric(*(value.to(device) for value in part)) for part in parts]
    return metric, steps, metric.compute()


@pytest.mark.parametrize("name", METRICS)
def test_metric_agrees_with_the_cpu(name):
    _, expected_steps, expected = measure(name, "cpu")
    metric, steps, result = measure(name, DEVICE)
    assert {leaf.device for leaf in _pytree.tree_leaves(result)} == {torch.device(DEVICE)}
    torch.testing.assert_close(to_cpu(steps), expected_steps)
    torch.testing.assert_close(to_cpu(result), expected)
    for other in (copy.deepcopy(metric), pickle.loads(pickle.dumps(metric))):
        torch.testing.assert_close(to_cpu(other.compute()), expected)


@pytest.mark.parametrize("name", ["accuracy", "auroc", "cat", "collection"])
def test_metric_states_move_and_are_saved(name, tmp_path):
    expected = measure(name, "cpu")[2]
    metric = measure(name, DEVICE)[0]
    metric.persistent(True)
    torch.save(metric.state_dict(), tmp_path / "state")
    state = torch.load(tmp_path / "state", map_location="openreg:0")
    loaded = METRICS[name][0]().to("openreg:0")
    loaded.persistent(True)
    loaded.load_state_dict(state)
    for other in (loaded, copy.deepcopy(metric).to("openreg:0"), copy.deepcopy(metric).to("cpu")):
        members = list(other.values()) if name == "collection" else [other]
        for member in members:
            member._update_count = 1  # of a loaded metric: it was updated, in its former life
        torch.testing.assert_close(to_cpu(other.compute()), expected)


def rank_synchronized(rank, expected):
    torch.openreg.set_device(rank)
    for name, (make, kind) in METRICS.items():
        metric = make().to(f"openreg:{rank}")
        metric.update(*(values.chunk(2)[rank].to(f"openreg:{rank}") for values in draw(kind)))
        torch.testing.assert_close(to_cpu(metric.compute()), expected[name], msg=name)


def test_metric_values_are_synchronized_over_processes(tmp_path):
    expected = {name: measure(name, "cpu")[2] for name in METRICS}
    ranks = Ranks(2, tmp_path)
    try:
        ranks.run(rank_synchronized, expected)
    finally:
        ranks.close()
