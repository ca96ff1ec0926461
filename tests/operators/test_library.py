"""What PyTorch builds on top of its operators: traced programs, distributions, parametrizations."""

import io

import pytest
import torch
import torch.nn.functional as F
from cpu_reference import DEVICE, alike, drawn, trained
from torch import distributions as dist
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.utils import parametrizations, parametrize, prune

import torch_openreg  # noqa: F401

# ---- Programs that are traced ----


class Sequence(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm, self.conv = nn.LSTM(3, 4), nn.Conv1d(4, 2, 1)

    def forward(self, x):
        return self.conv(self.lstm(x)[0].permute(1, 2, 0))


NETS = {
    "mlp": (lambda: nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.GELU()), (2, 3)),
    "images": (lambda: nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2)), (2, 1, 6, 6)),
    "sequence": (Sequence, (5, 2, 3)),
    "encoder": (lambda: nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True), (2, 5, 8)),
}  # fmt: skip


def compiled(net, x):
    torch._dynamo.reset()
    return torch.compile(net, backend="aot_eager")


def exported(net, x):
    file = io.BytesIO()
    torch.export.save(torch.export.export(net, (x,), strict=False).run_decompositions(), file)
    file.seek(0)
    return torch.export.load(file).module()


def scripted(net, x):
    file = io.BytesIO()
    torch.jit.save(torch.jit.script(net), file)
    file.seek(0)
    return torch.jit.load(file, map_location=x.device)


def traced(net, x):
    return torch.jit.trace(net, x, check_trace=False)


WAYS = [(traced, name) for name in NETS] + [(scripted, "images"), (scripted, "sequence")]
WAYS += [(compiled, "images"), (compiled, "encoder")]
WAYS += [(exported, "images"), (exported, "sequence")]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("way", "name"), WAYS)
def test_traced_nets_have_the_cpus_outputs_and_gradients(way, name, monkeypatch):
    make, size = NETS[name]
    # TorchScript knows operators by id() and keeps those of destroyed libraries: an attribute of
    # the net at such an address would be one.
    known = torch.jit._builtins._get_builtin_table().items()
    own = {key: name for key, name in known if name.startswith(("aten::", "prim::"))}
    monkeypatch.setattr(torch.jit._builtins, "_builtin_table", own)

    def program(device):
        net, x = make().to(device), drawn(device, *size)
        if way is exported:
            net.eval()
        program = way(net, x.detach())
        if way is exported:
            return program(x.detach())
        for _ in range(2):  # the second time as optimized by what it met the first time
            out = program(x)
        gradients = torch.autograd.grad(out.square().sum(), [x, *program.parameters()])
        return out, sorted((g.abs().sum().item() for g in gradients), key=float)

    alike(program)


def conditions(device):
    x = drawn(device, 3)
    results = [torch.cond(x.sum() > n, torch.sin, torch.cos, (x,)) for n in (-100, 100)]
    return results, torch.autograd.grad(results[0].sum(), x)


def graphs(device):
    x = drawn(device, 3, 3).detach()
    graph = make_fx(lambda x: x.sin() @ x.t())(x)
    symbolic = make_fx(torch.func.grad(lambda x: x.square().sum()), tracing_mode="symbolic")(x)
    return graph(x), symbolic(x), [str(node.target) for node in graph.graph.nodes]


@pytest.mark.parametrize("program", [conditions, graphs])
def test_traced_functions_have_the_cpus_results(program):
    alike(program)


# ---- Distributions ----


def pair(device, a=1.0, b=2.0):
    return torch.tensor([a, b], device=device)


def covariance(device):
    return torch.eye(2, device=device) * 2


# What is drawn is other numbers than the CPU's; what is computed is the same.
DISTRIBUTIONS = {
    "Normal": lambda d: dist.Normal(pair(d), pair(d)),
    "Bernoulli": lambda d: dist.Bernoulli(pair(d, 0.3, 0.7)),
    "Categorical": lambda d: dist.Categorical(pair(d, 0.3, 0.7)),
    "OneHotCategorical": lambda d: dist.OneHotCategorical(logits=pair(d)),
    "Multinomial": lambda d: dist.Multinomial(4, pair(d, 0.3, 0.7)),
    "Gamma": lambda d: dist.Gamma(pair(d), pair(d)),
    "Beta": lambda d: dist.Beta(pair(d), pair(d)),
    "Dirichlet": lambda d: dist.Dirichlet(pair(d)),
    "Exponential": lambda d: dist.Exponential(pair(d)),
    "Poisson": lambda d: dist.Poisson(pair(d)),
    "Laplace": lambda d: dist.Laplace(pair(d), pair(d)),
    "Uniform": lambda d: dist.Uniform(-pair(d), pair(d)),
    "StudentT": lambda d: dist.StudentT(pair(d) + 2),
    "Cauchy": lambda d: dist.Cauchy(pair(d), pair(d)),
    "Gumbel": lambda d: dist.Gumbel(pair(d), pair(d)),
    "Geometric": lambda d: dist.Geometric(pair(d, 0.3, 0.7)),
    "Binomial": lambda d: dist.Binomial(5, pair(d, 0.3, 0.7)),
    "NegativeBinomial": lambda d: dist.NegativeBinomial(5, pair(d, 0.3, 0.7)),
    "MultivariateNormal": lambda d: dist.MultivariateNormal(pair(d), covariance(d)),
    "LowRank": lambda d: dist.LowRankMultivariateNormal(pair(d), pair(d)[:, None], pair(d)),
    "VonMises": lambda d: dist.VonMises(pair(d), pair(d)),
    "Weibull": lambda d: dist.Weibull(pair(d), pair(d)),
    "Pareto": lambda d: dist.Pareto(pair(d), pair(d) + 1),
    "LogNormal": lambda d: dist.LogNormal(pair(d), pair(d)),
    "LKJCholesky": lambda d: dist.LKJCholesky(3, pair(d)),
    "Wishart": lambda d: dist.Wishart(pair(d)[1] + 2, covariance(d)),
    "Mixture": lambda d: dist.MixtureSameFamily(
        dist.Categorical(pair(d)), dist.Normal(pair(d), pair(d))
    ),
    "Transformed": lambda d: dist.TransformedDistribution(
        dist.Normal(pair(d), pair(d)), [dist.SigmoidTransform(), dist.AffineTransform(1.0, 2.0)]
    ),
}


@pytest.mark.parametrize("name", DISTRIBUTIONS)
def test_distributions_sample_on_the_device_with_the_cpus_densities(name):
    torch.manual_seed(0)
    on_cpu, there = DISTRIBUTIONS[name]("cpu"), DISTRIBUTIONS[name](DEVICE)
    drawn_there = there.sample((50,))
    assert drawn_there.device == torch.device(DEVICE)
    assert drawn_there.shape == on_cpu.sample((50,)).shape
    assert there.expand((3, *there.batch_shape)).sample().shape[0] == 3
    wanted = on_cpu.log_prob(drawn_there.cpu())
    torch.testing.assert_close(there.log_prob(drawn_there).cpu(), wanted, rtol=1e-4, atol=1e-4)
    for what in ("entropy", "mean", "variance"):
        try:
            figure = getattr(on_cpu, what)
            figure = figure() if callable(figure) else figure
        except NotImplementedError:
            continue
        mine = getattr(there, what)
        torch.testing.assert_close(
            (mine() if callable(mine) else mine).cpu(), figure, equal_nan=True
        )


def test_distribution_samples_have_gradients():
    for make in (dist.Gamma, dist.Beta, dist.Normal, lambda a, b: dist.Dirichlet(a * b)):
        a, b = (torch.tensor([2.0, 3.0], device=DEVICE, requires_grad=True) for _ in range(2))
        gradients = torch.autograd.grad(make(a, b).rsample().square().sum(), (a, b))
        assert all(g.isfinite().all() and g.count_nonzero() == 2 for g in gradients)
    alike(
        lambda d: dist.kl_divergence(dist.Gamma(pair(d), pair(d)), dist.Gamma(pair(d) + 1, pair(d)))
    )


# ---- Parameters ----


class Symmetric(nn.Module):
    def forward(self, x):
        return x.triu() + x.triu(1).t()


def parametrized(device):
    first = nn.Linear(3, 3)
    parametrize.register_parametrization(first, "weight", Symmetric())
    net = nn.Sequential(
        first,
        parametrizations.weight_norm(nn.Linear(3, 3)),
        parametrizations.spectral_norm(nn.Linear(3, 3)),
        parametrizations.orthogonal(nn.Linear(3, 3)),
    ).to(device)
    results = trained(net, drawn(device, 2, 3))
    with parametrize.cached():
        again = net(drawn(device, 2, 3))
    parametrize.remove_parametrizations(first, "weight")
    return results, again, first.weight


def pruned(device):
    layer = nn.Linear(4, 4).to(device)
    prune.l1_unstructured(layer, "weight", 0.5)
    prune.ln_structured(layer, "weight", 0.25, 2, 0)
    out = layer(torch.ones(1, 4, device=device))
    prune.remove(layer, "weight")
    return out, layer.weight


def as_one_vector(device):
    layer = nn.Linear(4, 4).to(device)
    vector = nn.utils.parameters_to_vector(layer.parameters())
    nn.utils.vector_to_parameters(vector * 2, layer.parameters())
    return vector, layer.weight


def fused(device):
    conv, norm = nn.Conv2d(1, 2, 3).to(device).eval(), nn.BatchNorm2d(2).to(device).eval()
    net = nn.utils.fusion.fuse_conv_bn_eval(conv, norm)
    return net(torch.ones(1, 1, 5, 5, device=device))


def saved_and_loaded(device):
    x, file = torch.arange(6.0, device=device).view(2, 3), io.BytesIO()
    net = nn.Linear(3, 3).to(device)
    torch.save({"net": net.state_dict(), "x": x, "view": x[1], "p": nn.Parameter(x)}, file)
    file.seek(0)
    loaded = torch.load(file)
    assert loaded["view"].untyped_storage().data_ptr() == loaded["x"].untyped_storage().data_ptr()
    other = nn.Linear(3, 3)
    other.load_state_dict(loaded["net"], assign=True)
    file.seek(0)
    assert torch.load(file, map_location="cpu")["x"].device.type == "cpu"
    return list(loaded.values()), other(x)


@pytest.mark.parametrize("program", [parametrized, pruned, as_one_vector, fused, saved_and_loaded])
def test_parametrizations_and_pruning_give_the_cpus_results(program):
    alike(program)


# ---- The rest ----


@pytest.mark.filterwarnings("ignore:The PyTorch API of MaskedTensors")
def masked(device):
    x = torch.arange(6.0, device=device).view(2, 3)
    tensor = torch.masked.masked_tensor(x, x > 1)
    return [
        tensor.sum().to_tensor(0.0), tensor.amax(1).to_tensor(0), (tensor * 2).to_tensor(0.0),
        torch.masked.mean(x, mask=x > 1), torch.masked.softmax(x, 1, mask=x > 0),
    ]  # fmt: skip


def loaded(device):
    data = torch.utils.data.TensorDataset(torch.arange(10.0), torch.arange(10))
    batches = torch.utils.data.DataLoader(data, batch_size=4, pin_memory=True)
    return [[t.to(device, non_blocking=True) for t in batch] for batch in batches]


def low_rank(device):
    matrix = torch.diag(torch.arange(1.0, 10.0)).to(device)
    return torch.svd_lowrank(matrix, q=9)[1].sort()[0], torch.pca_lowrank(matrix, q=3)[1].shape


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("program", [masked, loaded, low_rank])
def test_masked_loaded_and_low_rank_programs_give_the_cpus_results(program):
    alike(program)


def test_nn_init_fills_weights_of_the_device():
    for start in (
        nn.init.xavier_uniform_, nn.init.kaiming_normal_, nn.init.trunc_normal_, nn.init.normal_,
        nn.init.orthogonal_, nn.init.eye_, lambda w: nn.init.sparse_(w, 0.5),
    ):  # fmt: skip
        weight = start(torch.full((6, 6), 99.0, device=DEVICE))
        assert weight.device == torch.device(DEVICE) and weight.abs().max() < 10


def test_gumbel_softmax_and_channel_dropout_work():
    logits = torch.tensor([0.0, 1000.0, 0.0], device=DEVICE)
    assert F.gumbel_softmax(logits, hard=True).tolist() == [0, 1, 0]
    x = torch.ones(4, 50, 2, 2, device=DEVICE)
    sums = F.dropout2d(x, 0.5).sum((2, 3))
    assert set(sums.unique().tolist()) == {0.0, 8.0}
    assert F.alpha_dropout(x, 0.5, training=False).equal(x)
