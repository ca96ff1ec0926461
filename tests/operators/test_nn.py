"""Modules: outputs, gradients and buffers are the CPU's."""

import pytest
import torch
import torch.nn.functional as F
from cpu_reference import DEVICE, alike, drawn, trained
from torch import nn

import torch_openreg  # noqa: F401

# ---- Convolutions ----

CONVOLUTIONS = {
    (1, False): nn.Conv1d, (2, False): nn.Conv2d, (3, False): nn.Conv3d,
    (1, True): nn.ConvTranspose1d, (2, True): nn.ConvTranspose2d, (3, True): nn.ConvTranspose3d,
}  # fmt: skip
SETTINGS = {
    "plain": {},
    "groups": {"groups": 2},
    "depthwise": {"groups": 4, "bias": False},
    "strided": {"stride": 2, "padding": 1, "dilation": 2},
}
LAST = {2: torch.channels_last, 3: torch.channels_last_3d}


def convolution(dims, transposed, setting, dtype, channels_last=False):
    def program(device):
        conv = CONVOLUTIONS[dims, transposed](4, 8, 3, **SETTINGS[setting]).to(device, dtype)
        x = torch.randn(2, 4, *[7] * dims).to(dtype)
        if channels_last:
            conv = conv.to(memory_format=LAST[dims])
            x = x.contiguous(memory_format=LAST[dims])
        return trained(conv, x.to(device).requires_grad_())

    return program


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("transposed", [False, True], ids=["", "transposed"])
@pytest.mark.parametrize("dims", [1, 2, 3])
def test_convolution_has_the_cpus_outputs_and_gradients(dims, transposed, setting):
    alike(convolution(dims, transposed, setting, torch.float32))
    if dims in LAST:
        alike(convolution(dims, transposed, setting, torch.float32, channels_last=True))


@pytest.mark.parametrize("transposed", [False, True], ids=["", "transposed"])
def test_convolution_layout_follows_the_thread_count(run_ok, transposed):
    # By oneDNN with two threads, with one by another kernel, which has other strides.
    out = run_ok(
        f"""
        import torch

        conv = torch.nn.functional.conv{"_transpose" * transposed}3d
        torch.manual_seed(0)
        x = torch.randn(2, 8, 24, 24, 24).to(memory_format=torch.channels_last_3d)
        weight = torch.randn(8, 8, 1, 1, 1)
        expected, shown = [], []
        for threads in (1, 2):
            torch.set_num_threads(threads)
            expected.append(conv(x, weight))
        print(expected[0].stride() != expected[1].stride())
        for _ in range(2):
            got = conv(x.to("openreg"), weight.to("openreg"))
            torch.testing.assert_close(got.cpu(), expected[1])
        """
    )
    assert out.split() == ["True"]


def test_convolution_is_right_after_onednn_was_switched_off(run_ok):
    run_ok(
        """
        import torch

        torch.manual_seed(0)
        x = torch.randint(9, (2, 8, 9, 9, 9)).float().to(memory_format=torch.channels_last_3d)
        weight = torch.randint(9, (8, 8, 3, 3, 3)).float()
        expected = torch.nn.functional.conv3d(x, weight)
        for enabled in (True, False, True):
            torch._C._set_mkldnn_enabled(enabled)
            got = torch.nn.functional.conv3d(x.to("openreg"), weight.to("openreg"))
            torch.testing.assert_close(got.cpu(), expected)
        """
    )


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_convolutions_of_other_dtypes_are_the_cpus(dtype):
    for dims, transposed in CONVOLUTIONS:
        alike(convolution(dims, transposed, "groups", dtype))
    alike(convolution(2, False, "plain", dtype, channels_last=True))


@pytest.mark.parametrize("mode", ["zeros", "reflect", "replicate", "circular"])
@pytest.mark.parametrize("padding", [1, "same"])
def test_convolution_with_padding_is_the_cpus(mode, padding):
    alike(
        lambda device: trained(
            nn.Conv2d(2, 3, 3, padding=padding, padding_mode=mode).to(device),
            drawn(device, 2, 2, 6, 6),
        )
    )


def integers(device):
    return torch.arange(12, device=device).view(2, 2, 3)


def complexes(device, *sizes):
    return drawn(device, *sizes, dtype=torch.complex64)


CONVOLVED = {
    "unbatched": lambda d: F.conv2d(drawn(d, 2, 5, 5), drawn(d, 3, 2, 3, 3)),
    "nothing": lambda d: F.conv2d(drawn(d, 0, 2, 5, 5), drawn(d, 3, 2, 3, 3)),
    "integers": lambda d: F.conv1d(torch.arange(12, device=d).view(1, 2, 6), integers(d)),
    "complex": lambda d: F.conv2d(complexes(d, 1, 2, 5, 5), complexes(d, 3, 2, 3, 3)),
    "unfold": lambda d: F.unfold(drawn(d, 1, 2, 6, 6), 3),
    "fold": lambda d: F.fold(drawn(d, 1, 18, 16), 6, 3),
}  # fmt: skip


@pytest.mark.parametrize("name", CONVOLVED)
def test_convolution_of_unusual_calls_is_the_cpus(name):
    alike(CONVOLVED[name])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_convolutions_under_autocast_are_the_cpus(dtype):
    def program(device):
        net = nn.Sequential(nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 4, 3))
        net.to(device)
        with torch.autocast(torch.device(device).type, dtype=dtype):
            out = net(drawn(device, 2, 2, 8, 8))
        assert out.dtype == dtype
        out.float().square().mean().backward()
        # In half precision, whatever dtype they are handed over in.
        return out, [p.grad.to(dtype) for p in net.parameters()], list(net.buffers())[2].clone()

    alike(program)


@pytest.mark.parametrize("convolve", [F.conv2d, F.conv_transpose2d])
def test_convolution_passes_gradgradcheck(convolve):
    sizes = (1, 2, 4, 4), (2, 2, 3, 3), (2,)
    inputs = tuple(drawn(DEVICE, *size, dtype=torch.float64) for size in sizes)
    assert torch.autograd.gradcheck(convolve, inputs)
    assert torch.autograd.gradgradcheck(convolve, inputs)


# ---- Norms, pools and the rest ----

LAYERS = {
    "batch-norm-1d": (lambda: nn.BatchNorm1d(4), (3, 4, 5)),
    "batch-norm-3d": (lambda: nn.BatchNorm3d(4, momentum=None), (3, 4, 2, 3, 4)),
    "instance-norm": (lambda: nn.InstanceNorm2d(4, 1e-5, 0.1, True, True), (3, 4, 5, 5)),
    "group-norm": (lambda: nn.GroupNorm(2, 4), (3, 4, 5)),
    "layer-norm": (lambda: nn.LayerNorm([4, 5]), (3, 4, 5)),
    "rms-norm": (lambda: nn.RMSNorm(5), (3, 4, 5)),
    "local-response": (lambda: nn.LocalResponseNorm(2), (3, 4, 5, 5)),
    "max-pool": (lambda: nn.MaxPool2d(3, 2, 1), (3, 4, 6, 6)),
    "avg-pool": (lambda: nn.AvgPool3d(2), (3, 4, 4, 4, 4)),
    "adaptive-max": (lambda: nn.AdaptiveMaxPool2d(2), (3, 4, 5, 6)),
    "adaptive-avg": (lambda: nn.AdaptiveAvgPool3d(2), (3, 4, 4, 4, 5)),
    "power-pool": (lambda: nn.LPPool2d(2, 2), (3, 4, 6, 6)),
    "bilinear": (lambda: nn.Upsample(scale_factor=2, mode="bilinear"), (3, 4, 3, 3)),
    "bicubic": (lambda: nn.Upsample(scale_factor=2, mode="bicubic"), (3, 4, 3, 3)),
    "trilinear": (lambda: nn.Upsample(scale_factor=2, mode="trilinear"), (3, 4, 3, 3, 3)),
    "nearest": (lambda: nn.Upsample(scale_factor=2), (3, 4, 3)),
    "shuffle": (lambda: nn.PixelShuffle(2), (3, 4, 3, 3)),
    "unshuffle": (lambda: nn.PixelUnshuffle(2), (3, 4, 6, 6)),
    "channels": (lambda: nn.ChannelShuffle(2), (3, 4, 6, 6)),
    "prelu": (lambda: nn.PReLU(4), (3, 4)),
    "glu": (nn.GLU, (3, 4)),
    "mish": (nn.Mish, (3, 4)),
    "log-softmax": (lambda: nn.LogSoftmax(1), (3, 4)),
    "reflect": (lambda: nn.ReflectionPad3d(1), (2, 2, 4, 4, 4)),
    "circular": (lambda: nn.CircularPad2d(1), (2, 2, 4, 4)),
    "replicate": (lambda: nn.ReplicationPad2d(1), (2, 2, 4, 4)),
    "no-dropout": (lambda: nn.Dropout(0.0), (3, 4)),
    "all-dropout": (lambda: nn.Dropout(1.0), (3, 4)),
}  # fmt: skip


@pytest.mark.parametrize("name", LAYERS)
def test_layer_trains_and_evaluates_as_on_the_cpu(name):
    make, size = LAYERS[name]

    def program(device):
        layer = make().to(device)
        first = trained(layer, drawn(device, *size))
        layer.zero_grad()
        return first, trained(layer.eval(), drawn(device, *size))

    alike(program)


def indices(device):
    return torch.tensor([1, 2, 2, 5, 0, 1], device=device)


EMBEDDINGS = [{}, {"padding_idx": 1}, {"max_norm": 1.0}, {"scale_grad_by_freq": True}]


@pytest.mark.parametrize("settings", EMBEDDINGS, ids=str)
def test_embedding_has_the_cpus_outputs_and_gradients(settings):
    alike(lambda d: trained(nn.Embedding(6, 3, **settings).to(d), indices(d)))
    offsets = [0, 2, 2, 4]
    for mode in ("sum", "mean") + ("max",) * ("scale_grad_by_freq" not in settings):
        alike(
            lambda d, mode=mode: trained(
                nn.EmbeddingBag(6, 3, mode=mode, **settings).to(d),
                indices(d),
                torch.tensor(offsets, device=d),
            )
        )


class Weighted(nn.Module):
    def __init__(self):
        super().__init__()
        self.bag = nn.EmbeddingBag(6, 3, mode="sum", include_last_offset=True)

    def forward(self, ids, offsets, weights):
        return self.bag(ids, offsets, per_sample_weights=weights)


def test_weighted_embedding_bags_have_the_cpus_gradients():
    def program(device):
        offsets = torch.tensor([0, 2, 2, 6], device=device)
        return trained(Weighted().to(device), indices(device), offsets, drawn(device, 6))

    alike(program)


def ctc(x, lengths, target_lengths):
    log_probabilities = x[:, None].repeat(1, 2, 1).log_softmax(-1)
    targets = torch.tensor([[1, 2], [1, 1]], device=x.device)
    return F.ctc_loss(log_probabilities, targets, lengths, target_lengths)


LOSSES = {
    "cross-entropy": lambda x, y, t: F.cross_entropy(x, y, t[0], label_smoothing=0.1),
    "ignored": lambda x, y, t: F.cross_entropy(x, y, ignore_index=3),
    "probabilities": lambda x, y, t: F.cross_entropy(x, t.softmax(1)),
    "nll-2d": lambda x, y, t: F.nll_loss(x.reshape(2, 5, 2).log_softmax(1), y.reshape(2, 2)),
    "bce-logits": lambda x, y, t: F.binary_cross_entropy_with_logits(x, t, pos_weight=t[0]),
    "bce": lambda x, y, t: F.binary_cross_entropy(x.sigmoid(), t),
    "mse": lambda x, y, t: F.mse_loss(x, t),
    "l1": lambda x, y, t: F.l1_loss(x, t),
    "huber": lambda x, y, t: F.huber_loss(x, t),
    "smooth-l1": lambda x, y, t: F.smooth_l1_loss(x, t),
    "kl": lambda x, y, t: F.kl_div(x.log_softmax(1), t, reduction="batchmean"),
    "poisson": lambda x, y, t: F.poisson_nll_loss(x, t),
    "gaussian": lambda x, y, t: F.gaussian_nll_loss(x, t, t + 0.1),
    "multi-margin": lambda x, y, t: F.multi_margin_loss(x, y),
    "multi-label": lambda x, y, t: F.multilabel_margin_loss(x, y[:, None].repeat(1, 5)),
    "multi-label-soft": lambda x, y, t: F.multilabel_soft_margin_loss(x, t),
    "cosine": lambda x, y, t: F.cosine_embedding_loss(x, t, torch.ones(4, device=x.device)),
    "triplet": lambda x, y, t: F.triplet_margin_loss(x, t, x * 0.5 + t),
    "hinge": lambda x, y, t: F.hinge_embedding_loss(x, t.round() * 2 - 1),
    "soft-margin": lambda x, y, t: F.soft_margin_loss(x, t),
    "ranking": lambda x, y, t: F.margin_ranking_loss(x, t, torch.ones_like(t)),
    "distance": lambda x, y, t: F.pairwise_distance(x, t).sum() + F.pdist(x).sum(),
    "distances": lambda x, y, t: torch.cdist(x, t).sum(),
    "ctc": lambda x, y, t: ctc(x, (4, 4), (2, 1)),
    "ctc-lengths-on-the-cpu": lambda x, y, t: ctc(x, *torch.tensor([[4, 4], [2, 1]])),
    "ctc-lengths": lambda x, y, t: ctc(x, *torch.tensor([[4, 4], [2, 1]], device=x.device)),
}  # fmt: skip


@pytest.mark.parametrize("name", LOSSES)
def test_loss_has_the_cpus_value_and_gradient(name):
    def program(device):
        x, target = drawn(device, 4, 5), torch.rand(4, 5).to(device)
        loss = LOSSES[name](x, torch.tensor([0, 3, 2, 4], device=device), target)
        return loss, torch.autograd.grad(loss, x)

    alike(program)


def sampled_grid(device):
    x, theta = drawn(device, 1, 2, 5, 5), drawn(device, 1, 2, 3)
    grid = F.affine_grid(theta, [1, 2, 4, 4], align_corners=False)
    out = F.grid_sample(x, grid, align_corners=False)
    return out, torch.autograd.grad(out.square().sum(), (x, theta))


def unpooled(device):
    x = drawn(device, 1, 2, 6, 6)
    out, where = F.max_pool2d(x, 2, return_indices=True)
    back = F.max_unpool2d(out, where, 2)
    return out, where, back, torch.autograd.grad(back.square().sum(), x)


def adaptive_softmax(device):
    softmax = nn.AdaptiveLogSoftmaxWithLoss(8, 10, [3, 6]).to(device)
    x = drawn(device, 5, 8)
    out = softmax(x, torch.tensor([0, 4, 9, 7, 2], device=device))
    return *out, torch.autograd.grad(out.loss, x), softmax.predict(x), softmax.log_prob(x)


def bilinear_form(device):
    return trained(nn.Bilinear(3, 4, 5).to(device), drawn(device, 2, 3), drawn(device, 2, 4))


def interpolated(device):
    x = drawn(device, 1, 2, 6, 6)
    outs = [F.interpolate(x, (4, 3), mode=m, antialias=True) for m in ("bilinear", "bicubic")]
    outs += [F.interpolate(x, scale_factor=1.5, mode=m) for m in ("nearest-exact", "area")]
    return outs, torch.autograd.grad(sum(out.square().sum() for out in outs), x)


@pytest.mark.parametrize(
    "program", [sampled_grid, unpooled, adaptive_softmax, bilinear_form, interpolated]
)
def test_function_of_nn_has_the_cpus_results(program):
    alike(program)


# ---- Nets ----


class Block(nn.Module):
    def __init__(self, before, after, stride):
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(before, after, 3, stride, 1, bias=False), nn.BatchNorm2d(after),
            nn.ReLU(inplace=True),
            nn.Conv2d(after, after, 3, 1, 1, bias=False), nn.BatchNorm2d(after),
        )  # fmt: skip
        self.side = nn.Conv2d(before, after, 1, stride, bias=False)

    def forward(self, x):
        return F.relu(self.body(x) + self.side(x), inplace=True)


def residual_net(device):
    net = nn.Sequential(
        nn.Conv2d(3, 8, 7, 2, 3, bias=False), nn.BatchNorm2d(8), nn.ReLU(inplace=True),
        nn.MaxPool2d(3, 2, 1), Block(8, 8, 1), Block(8, 16, 2), nn.AdaptiveAvgPool2d(1),
        nn.Flatten(), nn.Linear(16, 4),
    )  # fmt: skip
    net.to(device).to(memory_format=torch.channels_last)
    x = drawn(device, 4, 3, 32, 32).detach().contiguous(memory_format=torch.channels_last)
    return trained(net, x)


def u_net(device):
    down, up = nn.Conv2d(1, 4, 3, padding=1).to(device), nn.ConvTranspose2d(4, 4, 2, 2).to(device)
    last = nn.Conv2d(8, 1, 1).to(device)
    x = drawn(device, 1, 1, 8, 8)
    hidden = down(x)
    out = last(torch.cat([up(F.avg_pool2d(hidden, 2)), hidden], 1))
    loss = F.binary_cross_entropy_with_logits(out, (x.detach() > 0).float())
    loss.backward()
    return loss, [p.grad for m in (down, up, last) for p in m.parameters()]


def decoder(device):
    """The next input depends on the last output."""
    encoder, cell = nn.GRU(4, 6, batch_first=True).to(device), nn.GRUCell(4, 6).to(device)
    head = nn.Linear(6, 4).to(device)
    x = drawn(device, 3, 5, 4)
    hidden, token, outs = encoder(x)[1][0], x[:, 0], []
    for _ in range(4):
        hidden = cell(token, hidden)
        outs.append(head(hidden))
        token = F.one_hot(outs[-1].argmax(1), 4).float()
    loss = torch.stack(outs).square().mean()
    loss.backward()
    return loss, [p.grad for m in (encoder, cell, head) for p in m.parameters()]


def gradient_penalty(device):
    critic = nn.Sequential(
        nn.Conv2d(1, 4, 3, stride=2, padding=1), nn.LeakyReLU(0.2), nn.Flatten(), nn.Linear(64, 1)
    ).to(device)
    x = drawn(device, 2, 1, 8, 8)
    (gradient,) = torch.autograd.grad(critic(x).sum(), x, create_graph=True)
    penalty = (gradient.flatten(1).norm(dim=1) - 1).square().mean()
    penalty.backward()
    return penalty, [p.grad for p in critic.parameters() if p.grad is not None]


@pytest.mark.parametrize("program", [residual_net, u_net, decoder, gradient_penalty])
def test_net_has_the_cpus_outputs_and_gradients(program):
    alike(program)


# ---- Modules that move ----


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(5, 3)
        self.head = nn.Linear(3, 5, bias=False)
        self.head.weight = self.table.weight

    def forward(self, tokens):
        return self.head(self.table(tokens))


def test_module_keeps_its_parameters_when_it_moves():
    """Otherwise tied weights come apart, and an optimizer made before holds the old ones."""
    model = Tied()
    weight, optimizer = model.table.weight, torch.optim.SGD(model.parameters(), lr=0.1)
    model(torch.tensor([1])).sum().backward()
    for device in ("openreg:0", DEVICE, "cpu", DEVICE):
        model.to(device)
        assert model.table.weight is weight and model.head.weight is weight
        assert weight.device == weight.grad.device == torch.device(device)
    before = weight.detach().clone()
    optimizer.zero_grad()
    model(torch.tensor([1], device=DEVICE)).sum().backward()
    optimizer.step()
    torch.testing.assert_close(weight.detach(), before - 0.1 * weight.grad)
    model.double().half().float().cpu()
    assert next(model.parameters()) is weight


@pytest.mark.parametrize("way", ["swap", "overwrite"])
def test_module_parameters_may_be_swapped_or_overwritten(way):
    choose = getattr(torch.__future__, f"set_{way}_module_params_on_conversion")
    choose(True)
    try:
        alike(lambda device: nn.Linear(3, 3).to(device).weight)
    finally:
        choose(False)


def test_parameter_data_of_another_device_has_its_gradient_there():
    x = torch.ones(2, requires_grad=True)
    (x * 2).sum().backward()
    x.grad = None
    x.data = torch.arange(3.0, device=DEVICE)
    (x * x).sum().backward()
    assert x.grad.device == torch.device(DEVICE) and x.grad.tolist() == [0, 2, 4]
    with pytest.raises(RuntimeError, match="incompatible tensor type"):
        x.data = torch.ones(3, device="meta")


def test_lazy_modules_take_their_sizes_from_a_batch():
    def program(device):
        net = nn.Sequential(
            nn.LazyConv2d(3, 3), nn.LazyBatchNorm2d(), nn.Flatten(), nn.LazyLinear(2)
        )
        net.to(device)
        for _ in range(2):
            out = net(torch.ones(2, 1, 5, 5, device=device))
        return out.shape, [(p.shape, torch.device(device) == p.device) for p in net.parameters()]

    alike(program)


@pytest.mark.parametrize(("first", "second"), [("cpu", DEVICE), (DEVICE, "cpu")])
def test_weights_and_inputs_on_two_devices_are_refused(first, second):
    for layer, size in ((nn.Linear(3, 2), (1, 3)), (nn.Conv1d(2, 2, 2), (1, 2, 3))):
        with pytest.raises(RuntimeError, match="same device"):
            layer.to(first)(torch.ones(size, device=second))
