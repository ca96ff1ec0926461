"""Training gives the CPU's losses, step by step, and takes no more memory over time."""

import copy

import pytest
import torch
import torch.nn.functional as F

import torch_openreg  # noqa: F401

DEVICE = "openreg:0"


class Lstm(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.table = torch.nn.Embedding(20, 8)
        self.lstm = torch.nn.LSTM(8, 12, num_layers=2, batch_first=True)
        self.head = torch.nn.Linear(12, 20)

    def forward(self, tokens):
        return self.head(self.lstm(self.table(tokens))[0]).transpose(1, 2)


class PackedLstm(Lstm):
    """Sequences of unlike length, packed."""

    def forward(self, tokens):
        length = tokens.shape[1]
        lengths = [max(1, length - 2 * i) for i in range(tokens.shape[0])]
        packed = torch.nn.utils.rnn.pack_padded_sequence(
            self.table(tokens), lengths, batch_first=True
        )
        out, _ = torch.nn.utils.rnn.pad_packed_sequence(
            self.lstm(packed)[0], batch_first=True, total_length=length
        )
        return self.head(out).transpose(1, 2)


class Transformer(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.table = torch.nn.Embedding(20, 16)
        self.layer = torch.nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
        self.head = torch.nn.Linear(16, 20)

    def forward(self, tokens):
        mask = torch.nn.Transformer.generate_square_subsequent_mask(
            tokens.shape[1], device=tokens.device
        )
        return self.head(self.layer(self.table(tokens), src_mask=mask)).transpose(1, 2)


def mlp():
    return torch.nn.Sequential(
        torch.nn.Linear(10, 32), torch.nn.ReLU(), torch.nn.Linear(32, 16), torch.nn.GELU(),
        torch.nn.LayerNorm(16), torch.nn.Linear(16, 5),
    )  # fmt: skip


def conv_net():
    # A bias before a batch norm has no gradient but rounding, which AdamW turns into whole steps:
    # the CPU's own differ with the number of its threads.
    return torch.nn.Sequential(
        torch.nn.Conv2d(1, 8, 3, padding=1, bias=False), torch.nn.BatchNorm2d(8), torch.nn.ReLU(),
        torch.nn.MaxPool2d(2), torch.nn.Conv2d(8, 8, 3, padding=1), torch.nn.ReLU(),
        torch.nn.AdaptiveAvgPool2d(2), torch.nn.Flatten(), torch.nn.Linear(32, 5),
    )  # fmt: skip


def vectors(size):
    return torch.randn(size, 10), torch.randint(5, (size,))


def images(size):
    return torch.randn(size, 1, 8, 8), torch.randint(5, (size,))


def tokens(length):
    text = torch.randint(20, (4, length + 1))
    return text[:, :-1], text[:, 1:]


SIZES = [8, 8, 8, 3, 11, 8, 5, 11, 3, 8]
ADAM = lambda p: torch.optim.Adam(p, lr=3e-3)  # noqa: E731
TASKS = {
    "mlp": (mlp, vectors, lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9)),
    "mlp-adam": (mlp, vectors, ADAM),
    "conv-net": (conv_net, images, lambda p: torch.optim.AdamW(p, lr=3e-3)),
    # Some of its gradients are zero but for rounding, which Adam would turn into whole steps.
    "transformer": (Transformer, tokens, lambda p: torch.optim.SGD(p, lr=0.1)),
    "lstm": (Lstm, tokens, ADAM),
    "packed-lstm": (PackedLstm, tokens, ADAM),
}


def train(model, make_optimizer, batches, device):
    """Losses; the host asks for them only at the end."""
    optimizer = make_optimizer(model.parameters())
    losses = []
    for x, y in batches:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x.to(device)), y.to(device))
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return torch.stack(losses).cpu()


@pytest.mark.parametrize("name", TASKS)
@pytest.mark.parametrize("sizes", [[8] * 10, SIZES], ids=["even", "uneven"])
def test_training_losses_are_the_cpus(name, sizes):
    make_model, make_batch, make_optimizer = TASKS[name]
    torch.manual_seed(0)
    model = make_model()
    batches = [make_batch(size) for size in sizes]
    there = copy.deepcopy(model).to(DEVICE)
    expected = train(model, make_optimizer, batches, "cpu")
    got = train(there, make_optimizer, batches, DEVICE)
    torch.testing.assert_close(got, expected, rtol=1e-3, atol=1e-4)
    state = there.state_dict()
    for key, value in model.state_dict().items():
        torch.testing.assert_close(state[key].cpu(), value, rtol=1e-2, atol=1e-3)


@pytest.mark.usefixtures("nothing_left")
@pytest.mark.parametrize("name", TASKS)
def test_training_does_not_grow_memory(name):
    make_model, make_batch, make_optimizer = TASKS[name]
    torch.manual_seed(0)
    model = make_model().to(DEVICE)
    optimizer = make_optimizer(model.parameters())
    batches = [tuple(t.to(DEVICE) for t in make_batch(size)) for size in (3, 5, 8, 11)]

    def run(steps):
        for step in range(steps):
            x, y = batches[step % len(batches)]
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
        optimizer.zero_grad()
        torch.openreg.synchronize()
        return torch.openreg.memory_allocated(), torch.openreg.memory_reserved()

    run(20)
    settled = run(20)
    for _ in range(3):
        assert run(20) == settled


def test_training_memory_is_bounded_while_the_host_runs_ahead():
    model = mlp().to(DEVICE)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    x, y = (t.to(DEVICE) for t in vectors(64))
    reserved = []
    for step in range(120):
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        if step % 20 == 19:
            reserved.append(torch.openreg.memory_reserved())
    assert reserved[1:] == [reserved[1]] * 5


def test_training_with_loss_scaling_has_the_cpus_losses():
    torch.manual_seed(0)
    reference = mlp()
    model = copy.deepcopy(reference).to(DEVICE)
    x, y = vectors(16)
    losses = []
    for net, device in ((reference, "cpu"), (model, DEVICE)):
        scaler = torch.amp.GradScaler(device, init_scale=256.0)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
        for _ in range(5):
            optimizer.zero_grad()
            loss = F.cross_entropy(net(x.to(device)), y.to(device))
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
        losses.append(loss.item())
    assert losses[0] == pytest.approx(losses[1], rel=1e-3)


def test_backward_twice_and_through_gradients_is_the_cpus():
    torch.manual_seed(0)
    x = torch.randn(6, 4)
    results = []
    for device in ("cpu", DEVICE):
        w = torch.linspace(-1, 1, 4, device="cpu").to(device).requires_grad_()
        out = (x.to(device) @ w).tanh().square().sum()
        (gradient,) = torch.autograd.grad(out, w, create_graph=True)
        gradient.square().sum().backward()
        results.append(w.grad.cpu())
    torch.testing.assert_close(*results)
