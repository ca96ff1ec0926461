"""Random numbers: a seed and a counter for each device, whatever the streams do."""

import warnings

import pytest
import torch
import torch.nn.functional as F
import torch.utils.checkpoint

import torch_openreg  # noqa: F401

DEVICE = "openreg:0"
OTHER = "openreg:1"
DEVICES = [f"openreg:{index}" for index in range(torch.openreg.device_count())]
two_devices = pytest.mark.skipif("torch.openreg.device_count() < 2")

DRAWS = {
    "rand": lambda d, g=None: torch.rand(100, device=d, generator=g),
    "randn": lambda d, g=None: torch.randn(100, device=d, generator=g),
    "randint": lambda d, g=None: torch.randint(1000, (100,), device=d, generator=g),
    "randperm": lambda d, g=None: torch.randperm(100, device=d, generator=g),
    "normal": lambda d, g=None: torch.normal(torch.zeros(100, device=d), 2.0, generator=g),
    "normal_": lambda d, g=None: torch.empty(100, device=d).normal_(1, 2, generator=g),
    "uniform_": lambda d, g=None: torch.empty(100, device=d).uniform_(-1, 1, generator=g),
    "exponential_": lambda d, g=None: torch.empty(100, device=d).exponential_(generator=g),
    "geometric_": lambda d, g=None: torch.empty(100, device=d).geometric_(0.1, generator=g),
    "cauchy_": lambda d, g=None: torch.empty(100, device=d).cauchy_(generator=g),
    "log_normal_": lambda d, g=None: torch.empty(100, device=d).log_normal_(generator=g),
    "random_": lambda d, g=None: torch.empty(100, device=d).random_(1000, generator=g),
    "bernoulli": lambda d, g=None: torch.bernoulli(torch.full((100,), 0.5, device=d), generator=g),
    "bernoulli_p": lambda d, g=None: torch.empty(100, device=d).bernoulli(0.5, generator=g),
    "bernoulli_": lambda d, g=None: torch.empty(100, device=d).bernoulli_(0.5, generator=g),
    "multinomial": lambda d, g=None: torch.multinomial(torch.ones(50, device=d), 20, generator=g),
    "poisson": lambda d, g=None: torch.poisson(torch.full((100,), 9.0, device=d), generator=g),
}
WITHOUT_GENERATOR = {
    "rand_like": lambda d: torch.rand_like(torch.empty(100, device=d)),
    "randn_like": lambda d: torch.randn_like(torch.empty(100, device=d)),
    "randint_like": lambda d: torch.randint_like(torch.empty(100, device=d), 1000),
    "dropout": lambda d: F.dropout(torch.ones(100, device=d)),
    "dropout_": lambda d: F.dropout(torch.ones(100, device=d), inplace=True),
    "dropout_module": lambda d: torch.nn.Dropout(0.3)(torch.ones(100, device=d)),
    "dropout2d": lambda d: F.dropout2d(torch.ones(50, 4, 2, 2, device=d)),
    "alpha_dropout": lambda d: F.alpha_dropout(torch.ones(100, device=d), training=True),
    "native_dropout": lambda d: torch.native_dropout(torch.ones(100, device=d), 0.5, True)[0],
    "rrelu": lambda d: F.rrelu(-torch.ones(100, device=d), training=True),
    "attention": lambda d: F.scaled_dot_product_attention(
        *[torch.ones(1, 1, 20, 4, device=d)] * 3, dropout_p=0.5
    ),
    "gumbel_softmax": lambda d: F.gumbel_softmax(torch.zeros(100, device=d)),
    "lstm_dropout": lambda d: _lstm(d),
    "fractional_pool": lambda d: F.fractional_max_pool2d(
        torch.arange(400.0, device=d).view(1, 1, 20, 20), 2, output_ratio=(0.6, 0.6)
    ),
}


def _lstm(device):
    net = torch.nn.LSTM(3, 4, num_layers=2, dropout=0.5, device="meta").to_empty(device=device)
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.fill_(0.3)
    return net(torch.ones(5, 2, 3, device=device))[0].detach()


ALL = {**DRAWS, **WITHOUT_GENERATOR}


@pytest.mark.parametrize("name", ALL)
def test_seed_repeats_numbers_and_calls_differ(name):
    draw = ALL[name]
    torch.manual_seed(11)
    first, second = draw(DEVICE).cpu(), draw(DEVICE).cpu()
    torch.manual_seed(11)
    assert torch.equal(draw(DEVICE).cpu(), first)
    assert torch.equal(draw(DEVICE).cpu(), second)
    assert not torch.equal(first, second)
    torch.manual_seed(12)
    assert not torch.equal(draw(DEVICE).cpu(), first)


@pytest.mark.parametrize("name", ALL)
def test_cpu_generator_does_not_move(name):
    ALL[name](DEVICE)
    before = torch.get_rng_state()
    ALL[name](DEVICE)
    torch.openreg.synchronize()
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("name", ALL)
def test_draw_moves_the_devices_generator(name):
    before = torch.openreg.get_rng_state(DEVICE)
    ALL[name](DEVICE)
    assert not torch.equal(torch.openreg.get_rng_state(DEVICE), before)


@pytest.mark.parametrize("name", ALL)
def test_random_state_replays_exactly(name):
    ALL[name](DEVICE)
    state = torch.openreg.get_rng_state(DEVICE)
    first = ALL[name](DEVICE).cpu()
    after = torch.openreg.get_rng_state(DEVICE)
    ALL[name](DEVICE)
    torch.openreg.set_rng_state(state, DEVICE)
    assert torch.equal(ALL[name](DEVICE).cpu(), first)
    assert torch.equal(torch.openreg.get_rng_state(DEVICE), after)


@pytest.mark.parametrize("name", DRAWS)
def test_generator_of_the_program_draws_apart_from_the_default(name):
    draw = DRAWS[name]
    default = torch.openreg.get_rng_state(DEVICE)
    generator = torch.Generator(DEVICE).manual_seed(5)
    first, second = draw(DEVICE, generator).cpu(), draw(DEVICE, generator).cpu()
    generator.manual_seed(5)
    assert torch.equal(draw(DEVICE, generator).cpu(), first)
    assert not torch.equal(first, second)
    assert torch.equal(torch.openreg.get_rng_state(DEVICE), default)


@pytest.mark.parametrize("name", DRAWS)
def test_generator_of_another_device_is_named(name):
    with pytest.raises(RuntimeError, match="'openreg' device type for generator but found 'cpu'"):
        DRAWS[name](DEVICE, torch.Generator())
    if len(DEVICES) > 1:
        with pytest.raises(RuntimeError, match=r"openreg:0.*openreg:1|openreg:1.*openreg:0"):
            DRAWS[name](DEVICE, torch.Generator(OTHER))
    with pytest.raises(RuntimeError, match="openreg"):
        DRAWS[name]("cpu", torch.Generator(DEVICE))


# ---- Devices, streams and threads ----


@two_devices
def test_seed_gives_the_same_numbers_on_each_device():
    draws = []
    for device in DEVICES:
        torch.manual_seed(3)
        draws.append([draw(device).cpu() for draw in ALL.values()])
    for mine, theirs in zip(*draws[:2], strict=True):
        assert torch.equal(mine, theirs)


@two_devices
def test_devices_do_not_share_a_generator():
    torch.manual_seed(3)
    first = torch.rand(9, device=DEVICE).cpu()
    other = torch.rand(9, device=OTHER).cpu()
    assert torch.equal(first, other)
    state = torch.openreg.get_rng_state(OTHER)
    torch.rand(9, device=DEVICE)
    assert torch.equal(torch.openreg.get_rng_state(OTHER), state)


def test_numbers_do_not_depend_on_streams(runs_ahead):
    def draw(streams):
        torch.manual_seed(8)
        results = []
        for i in range(24):
            stream = streams[i % len(streams)]
            with stream:
                results.append(torch.rand(40 + i, device=DEVICE))
                results.append(torch.empty(9, device=DEVICE).normal_())
                results.append(F.dropout(torch.ones(50, device=DEVICE)))
        torch.openreg.synchronize()
        return [r.cpu() for r in results]

    current = torch.accelerator.current_stream()
    expected = draw([current])
    side = [torch.Stream(DEVICE) for _ in range(3)]
    with side[0]:
        torch.openreg._sleep(20_000_000)
    for got in (draw(side), draw([current, *side])):
        assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))


def test_random_state_and_draws_touch_no_stream(runs_ahead):
    torch.randn(64, device=DEVICE)
    F.dropout(torch.ones(64, device=DEVICE))

    def run():
        torch.manual_seed(4)
        state = torch.openreg.get_rng_state()
        results = [torch.randn(64, device=DEVICE), F.dropout(torch.ones(64, device=DEVICE))]
        torch.openreg.set_rng_state(state)
        results += [torch.randn(64, device=DEVICE), F.dropout(torch.ones(64, device=DEVICE))]
        torch.openreg.default_generators[0].set_offset(7)
        assert torch.openreg.default_generators[0].get_offset() == 7
        assert torch.openreg.initial_seed() == 4
        return results

    a, b, c, d = (t.cpu() for t in runs_ahead(run))
    assert torch.equal(a, c) and torch.equal(b, d)


# ---- State ----


def test_generator_offset_counts_draws():
    generator = torch.Generator(DEVICE).manual_seed(9)
    assert generator.get_offset() == 0
    numbers = [torch.rand(4, device=DEVICE, generator=generator).cpu() for _ in range(4)]
    assert generator.get_offset() == 4
    generator.set_offset(2)
    assert torch.equal(torch.rand(4, device=DEVICE, generator=generator).cpu(), numbers[2])
    other = torch.Generator(DEVICE).manual_seed(1)
    other.set_state(generator.get_state())
    assert other.initial_seed() == 9 and other.get_offset() == 3
    assert torch.equal(torch.rand(4, device=DEVICE, generator=other).cpu(), numbers[3])
    copy = generator.clone_state()
    assert torch.equal(copy.get_state(), generator.get_state())


def test_generators_share_a_state():
    """As torch.utils.checkpoint's compiled form uses it: draws of one move the other."""

    def numbers(generator):
        return torch.rand(4, device=DEVICE, generator=generator).tolist()

    one, two = (torch.Generator(DEVICE).manual_seed(seed) for seed in (1, 2))
    expected = [[numbers(g.clone_state()) for g in (one, two)], numbers(two.clone_state())]
    before = one.graphsafe_get_state()
    one.graphsafe_set_state(two.graphsafe_get_state())
    assert numbers(one) == expected[0][1] and one.initial_seed() == 2
    assert two.get_offset() == one.get_offset() == 1
    two.set_offset(0)
    assert numbers(one) == expected[1]
    one.graphsafe_set_state(before)
    assert numbers(one) == expected[0][0] and two.get_offset() == 1
    for other in torch.Generator("openreg:1"), torch.Generator():
        with pytest.raises(ValueError, match=f"one of {other.device}"):
            one.graphsafe_set_state(other)
    assert one.initial_seed() == 1 and one.get_offset() == 1


def test_default_generator_offset_is_read_and_set_by_device():
    torch.openreg.manual_seed(3)
    assert torch.openreg._get_rng_state_offset() == 0
    torch.rand(3, device="openreg")
    second = torch.rand(3, device="openreg")
    assert torch.openreg._get_rng_state_offset() == 2
    torch.openreg._set_rng_state_offset(1, "openreg")
    assert torch.rand(3, device="openreg").equal(second)
    before = torch.openreg._get_rng_state_offset(0)
    torch.openreg._set_rng_state_offset(7, 1)
    assert torch.openreg._get_rng_state_offset(torch.device("openreg:1")) == 7
    assert torch.openreg._get_rng_state_offset(0) == before
    assert torch.openreg._get_generator(torch.device("openreg:1")).get_offset() == 7


def test_bad_random_state_changes_nothing():
    state = torch.openreg.get_rng_state()
    with pytest.raises(ValueError, match="16 bytes, got 5"):
        torch.openreg.set_rng_state(torch.zeros(5, dtype=torch.uint8))
    with pytest.raises(TypeError, match="uint8"):
        torch.openreg.set_rng_state(torch.zeros(16))
    assert torch.equal(torch.openreg.get_rng_state(), state)


def test_fork_rng_restores_every_device():
    torch.manual_seed(6)
    before = [torch.openreg.get_rng_state(d) for d in DEVICES]
    cpu = torch.get_rng_state()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with torch.random.fork_rng(devices=range(len(DEVICES)), device_type="openreg"):
            torch.manual_seed(77)
            for device in DEVICES:
                torch.rand(5, device=device)
            torch.rand(5)
    assert all(
        torch.equal(torch.openreg.get_rng_state(d), s) for d, s in zip(DEVICES, before, strict=True)
    )
    assert torch.equal(torch.get_rng_state(), cpu)


def test_seed_before_first_use_counts(run_ok):
    program = """
        import torch
        torch.manual_seed(21)
        {first}
        for device in ("openreg:0", "openreg:1"):
            print(torch.rand(3, device=device).tolist(), end=" ")
        print()
        print(torch.openreg.initial_seed())
    """
    late = "torch.ones(1, device='openreg:0'); torch.manual_seed(21)"
    early = run_ok(program.format(first="assert not torch.openreg.is_initialized()"))
    assert early == run_ok(program.format(first=late))
    assert early.splitlines()[1] == "21"
    assert early != run_ok(program.format(first="torch.openreg.manual_seed(22)"))


def test_checkpointing_replays_dropout():
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Dropout(0.5)).to(DEVICE)
    x = torch.ones(4, 8, device=DEVICE, requires_grad=True)
    gradients = []
    for checkpointed in (False, True):
        torch.manual_seed(5)
        if checkpointed:
            out = torch.utils.checkpoint.checkpoint(net, x, use_reentrant=False)
        else:
            out = net(x)
        out.square().sum().backward()
        gradients.append(x.grad.cpu())
        x.grad = None
    torch.testing.assert_close(*gradients)


# ---- The numbers themselves ----


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_normal_numbers_have_mean_and_deviation(dtype):
    torch.manual_seed(1)
    x = torch.randn(200_000, device=DEVICE, dtype=dtype).cpu()
    assert abs(x.mean().item()) < 0.01 and abs(x.std().item() - 1) < 0.01
    # Also over many small draws, each of which has a sequence of its own.
    x = torch.cat([torch.randn(100, device=DEVICE, dtype=dtype) for _ in range(2000)]).cpu()
    assert abs(x.mean().item()) < 0.01 and abs(x.std().item() - 1) < 0.01
    first = torch.cat([torch.rand(1, device=DEVICE, dtype=dtype) for _ in range(4000)]).cpu()
    assert abs(first.mean().item() - 0.5) < 0.03 and first.unique().numel() > 3900
    neighbours = torch.corrcoef(torch.stack([first[1:], first[:-1]]))[0, 1]
    assert abs(neighbours.item()) < 0.06


def test_neighbouring_seeds_are_unrelated():
    draws = []
    for seed in range(64):
        torch.manual_seed(seed)
        draws.append(torch.randn(500, device=DEVICE).cpu())
    correlation = torch.corrcoef(torch.stack(draws))
    correlation.fill_diagonal_(0)
    assert correlation.abs().max().item() < 0.3


def test_dropout_keeps_the_mean_and_differentiates():
    torch.manual_seed(2)
    x = torch.ones(100_000, device=DEVICE, requires_grad=True)
    y = F.dropout(x, 0.2)
    y.sum().backward()
    kept = (y != 0).float().mean().item()
    assert abs(kept - 0.8) < 0.01
    assert torch.equal(x.grad.cpu(), y.detach().cpu())
    assert torch.equal(F.dropout(x, 0.2, training=False).cpu(), torch.ones(100_000))
