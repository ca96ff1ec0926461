"""LSTM, GRU and RNN, their cells, and packed sequences: the CPU's outputs and gradients."""

import pytest
import torch
from cpu_reference import DEVICE, alike, drawn, trained
from torch import nn
from torch.nn.utils import rnn

import torch_openreg  # noqa: F401

RECURRENT = {
    "plain": {},
    "layers": {"num_layers": 2, "dropout": 0.0},
    "bidirectional": {"num_layers": 2, "bidirectional": True},
    "no-bias": {"bias": False},
    "batch-first": {"batch_first": True},
}
PROJECTED = {
    "projected": {"proj_size": 3},
    "projected-both-ways": {"proj_size": 3, "bidirectional": True, "num_layers": 2},
}
KINDS = [(kind, name) for kind in (nn.LSTM, nn.GRU, nn.RNN) for name in RECURRENT]
KINDS += [(nn.LSTM, name) for name in PROJECTED]


def flat(outputs):
    out, hidden = outputs
    return (out, *hidden) if isinstance(hidden, tuple) else (out, hidden)


class Recurrent(nn.Module):
    def __init__(self, kind, dtype=torch.float32, **settings):
        super().__init__()
        self.net = kind(4, 5, **settings).to(dtype)

    def forward(self, x, *hidden):
        if hidden:
            hidden = (hidden if isinstance(self.net, nn.LSTM) else hidden[0],)
        return flat(self.net(x, *hidden))


class Packed(Recurrent):
    """Sequences of unlike lengths, not sorted by them."""

    def forward(self, x):
        first = self.net.batch_first
        lengths = [2, 6, 1] if first else [2, 3, 1, 3, 2, 1]
        packed = rnn.pack_padded_sequence(x, lengths, batch_first=first, enforce_sorted=False)
        out, *hidden = flat(self.net(packed))
        out, back = rnn.pad_packed_sequence(out, batch_first=first)
        assert back.tolist() == lengths and back.device.type == "cpu"
        return (out, *hidden)


def hidden_states(settings, batch, device):
    layers = settings.get("num_layers", 1) * (1 + settings.get("bidirectional", False))
    return drawn(device, layers, batch, settings.get("proj_size", 5)), drawn(
        device, layers, batch, 5
    )


@pytest.mark.parametrize(("kind", "name"), KINDS)
def test_recurrent_net_has_the_cpus_outputs_and_gradients(kind, name):
    settings = {**RECURRENT, **PROJECTED}[name]
    batch = 3 if settings.get("batch_first") else 6

    def program(device):
        states = hidden_states(settings, batch, device)[: 2 if kind is nn.LSTM else 1]
        x = drawn(device, 3, 6, 4)
        return [
            trained(Recurrent(kind, **settings).to(device), x),
            trained(Recurrent(kind, **settings).to(device), x, *states),
            trained(Recurrent(kind, **settings).to(device), x[0].detach()),
            trained(Packed(kind, **settings).to(device), x),
        ]

    alike(program)


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_recurrent_net_in_inference_mode_is_the_cpus(kind):
    def program(device):
        net = Recurrent(kind, num_layers=2, dropout=0.5).to(device).eval()
        with torch.inference_mode():
            return [t.clone() for t in net(drawn(device, 3, 6, 4))]

    alike(program)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_recurrent_net_of_another_dtype_is_the_cpus(kind, dtype):
    def program(device):
        net = Recurrent(kind, dtype, num_layers=2).to(device)
        # Squares in half precision tell nothing of the gradients.
        out = net(drawn(device, 3, 6, 4, dtype=dtype))
        out[0].float().mean().backward()
        return out, [p.grad for p in net.parameters()]

    alike(program)


@pytest.mark.parametrize("kind", [nn.LSTMCell, nn.GRUCell, nn.RNNCell])
@pytest.mark.parametrize("bias", [True, False])
def test_recurrent_cell_has_the_cpus_states_and_gradients(kind, bias):
    def program(device):
        cell = kind(4, 5, bias=bias).to(device)
        results = []
        for size in ((3, 4), (4,)):
            x, state = drawn(device, *size), None
            for _ in range(3):
                state = cell(x, state)
            states = state if isinstance(state, tuple) else (state,)
            gradients = torch.autograd.grad(
                sum(s.square().sum() for s in states), [x, *cell.parameters()]
            )
            results.append((states, gradients))
        return results

    alike(program)


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_recurrent_net_passes_gradgradcheck(kind):
    net = kind(2, 3).to(DEVICE, torch.float64)
    x = drawn(DEVICE, 2, 1, 2, dtype=torch.float64)
    assert torch.autograd.gradcheck(lambda x: net(x)[0], (x,))
    assert torch.autograd.gradgradcheck(lambda x: net(x)[0], (x,))


def test_recurrent_cells_of_too_few_gates_are_refused():
    x = torch.ones(2, 2, device=DEVICE)
    with pytest.raises(RuntimeError, match=r"gates of size \[2, 2\] by 4"):
        torch.ops.aten._thnn_fused_lstm_cell(x, x, x)
    with pytest.raises(RuntimeError, match=r"gates of size \[2, 2\] by 3"):
        torch.ops.aten._thnn_fused_gru_cell(x, x, x)


def test_recurrent_dropout_between_layers_follows_the_seed():
    net = nn.LSTM(4, 5, num_layers=2, dropout=0.5).to(DEVICE)
    x = drawn(DEVICE, 3, 6, 4)
    results = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        out = net(x)[0]
        results.append((out, *torch.autograd.grad(out.sum(), x)))
    same, again, other = results
    assert all(map(torch.equal, same, again))
    assert not torch.equal(same[0], other[0])


def test_packed_sequences_move_and_unpack():
    def program(device):
        x = torch.arange(24.0).view(3, 4, 2)
        packed = rnn.pack_padded_sequence(x, [4, 2, 3], batch_first=True, enforce_sorted=False)
        there = packed.pin_memory().to(device, non_blocking=True)
        assert there.batch_sizes.device.type == "cpu" and there.cpu().data.equal(packed.data)
        lists = [torch.arange(n, device=device) for n in (2, 4)]
        packed_list = rnn.pack_sequence(lists, enforce_sorted=False)
        padded = rnn.pad_sequence(lists, batch_first=True)
        unpadded = rnn.unpad_sequence(padded, torch.tensor([2, 4]), batch_first=True)
        return [*there[:1], *there[2:], packed_list.data, padded, unpadded]

    alike(program)
