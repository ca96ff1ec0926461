"""Operators on lists of tensors, which are one task each, and the optimizers that use them."""

import copy
import inspect

import pytest
import torch
import torch.nn.functional as F
from host_ahead import DEVICE, compare, on_device, unseen_sizes

import torch_openreg  # noqa: F401

OTHER = "openreg:1"
two_devices = pytest.mark.skipif("torch.openreg.device_count() < 2")

# ---- Every operator ----


def find(name):
    name, _, overload = name.removeprefix("aten::").partition(".")
    return getattr(getattr(torch.ops.aten, name), overload or "default")


def is_tested(op):
    outputs = [argument for argument in op._schema.arguments if argument.is_out]
    copies = op._schema.name.startswith("aten::_foreach_copy")
    return not outputs and not copies and op._schema.name != "aten::_foreach_zero"


OPERATORS = {
    name.removeprefix("aten::_foreach_"): find(name)
    for name in sorted(torch._C._dispatch_get_all_op_names())
    if name.startswith("aten::_foreach_") and is_tested(find(name))
}
IN_PLACE = [name for name in OPERATORS if name.partition(".")[0].endswith("_")]
NEW = [name for name in OPERATORS if name not in IN_PLACE]
SHAPES = [(3, 4), (5,), (), (0,), (2, 1, 3)]


def values(shape, dtype):
    if dtype.is_floating_point or dtype.is_complex:
        return (torch.rand(shape) * 0.8 + 0.1).to(dtype)
    return torch.randint(1, 4, shape).to(dtype)


def arguments(op, dtype, shapes=SHAPES):
    """What the schema asks for, but for what has a default."""
    made = []
    number = 0.5 if dtype.is_floating_point or dtype.is_complex else 2
    if op._schema.name == "aten::_foreach_mm":
        shapes = [(n, n) for n in range(1, len(shapes) + 1)]
    for argument in op._schema.arguments:
        kind = str(argument.type)
        if argument.default_value is not None or "Optional" in kind:
            continue
        if kind == "List[Tensor]":
            made.append([values(shape, dtype) for shape in shapes])
        elif kind == "List[number]":
            made.append([number + i for i in range(len(shapes))])
        elif kind == "Tensor":
            made.append(values((len(shapes),) if argument.name == "scalars" else (), dtype))
        else:
            assert kind == "number", f"{op} has an argument of an unknown kind: {argument}"
            made.append(number)
    return made


def outcome(op, made):
    """The type of the error that the call itself raises, or what it returns and has written."""
    try:
        returned = op(*made)
    except Exception as error:
        return type(error)
    return [*(returned or ()), *(made[0] if isinstance(made[0], list) else made[1])]


def check(op, made):
    there = on_device(copy.deepcopy(made))
    expected = outcome(op, made)
    got = outcome(op, there)
    if isinstance(expected, type) or isinstance(got, type):
        assert got == expected
    else:
        compare(got, expected)
    return got


DTYPES = [torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex64]


@pytest.mark.parametrize("name", OPERATORS)
def test_foreach_operator_has_the_cpus_values_or_errors(name):
    for dtype in DTYPES:
        for _ in range(2):  # one that is new, and one that is remembered
            check(OPERATORS[name], arguments(OPERATORS[name], dtype))
    torch.openreg.synchronize()


def test_foreach_operators_of_all_families_are_tested():
    families = {name.partition(".")[0] for name in OPERATORS}
    assert families >= {"add", "add_", "lerp", "pow_", "norm", "max", "addcdiv_", "zero_", "sqrt"}
    assert len(OPERATORS) > 140


def test_foreach_arguments_with_defaults_are_the_cpus():
    xs, ys = (arguments(OPERATORS["add.List"], torch.float32)[0] for _ in range(2))
    for function in (
        lambda xs, ys: torch._foreach_add(xs, ys, alpha=0.5),
        lambda xs, ys: torch._foreach_addcmul(xs, ys, ys, value=-2),
        lambda xs, ys: torch._foreach_norm(xs, 1),
        lambda xs, ys: torch._foreach_norm(xs, 2, torch.float64),
        lambda xs, ys: torch._foreach_clone(xs, memory_format=torch.preserve_format),
    ):
        compare(function(on_device(xs), on_device(ys)), function(xs, ys))


def test_foreach_in_place_runs_ahead_at_the_first_call(runs_ahead):
    size = next(unseen_sizes)
    calls = []
    for name in IN_PLACE:
        made = arguments(OPERATORS[name], torch.float32, [(size,), (2, size)])
        calls.append((OPERATORS[name], made, on_device(copy.deepcopy(made))))
    torch.openreg.synchronize()
    ready = [call for call in calls if "Tensor scalars" not in str(call[0]._schema)]
    runs_ahead(lambda: [op(*there) for op, _, there in ready])
    for op, made, there in ready:
        op(*made)
        compare(there[0], made[0])


def test_foreach_in_place_of_other_dtypes_runs_ahead_at_the_first_call(runs_ahead):
    size = next(unseen_sizes)
    xs = [torch.ones(size, dtype=torch.int64, device=DEVICE), torch.ones(2, device=DEVICE)]
    runs_ahead(lambda: torch._foreach_add_(xs, 2))
    assert [x.tolist() for x in xs] == [[3] * size, [3.0] * 2]


def test_foreach_new_lists_run_ahead_at_the_first_call(runs_ahead):
    def call():
        return [op(*there) for op, _, there in calls]

    calls = []
    for name in NEW:
        made = arguments(OPERATORS[name], torch.float32, [(4,), (2, next(unseen_sizes))])
        calls.append((OPERATORS[name], made, on_device(made)))
    torch.openreg.synchronize()
    for got, (op, made, _) in zip(runs_ahead(call), calls, strict=True):
        compare(got, op(*made))


# ---- Bad lists ----


@pytest.mark.parametrize("name", OPERATORS)
def test_foreach_refuses_lists_of_different_lengths(name):
    op = OPERATORS[name]
    made = arguments(op, torch.float32)
    for i, value in enumerate(made):
        if i == 0 or not isinstance(value, list):
            continue
        for items in (value[:-1], [*value, value[0]], []):
            bad = [*made[:i], items, *made[i + 1 :]]
            if isinstance(bad[0], list):  # the error is one of the call
                assert isinstance(check(op, bad), type)
    torch.openreg.synchronize()
    check(op, made)


def test_foreach_refuses_empty_lists():
    for function in (
        lambda: torch._foreach_add([], 1),
        lambda: torch._foreach_add([], [torch.ones(2, device=DEVICE)]),
        lambda: torch._foreach_sqrt_([]),
    ):
        with pytest.raises((RuntimeError, NotImplementedError)):
            function()
    torch.openreg.synchronize()


def test_foreach_refuses_sizes_and_dtypes_that_do_not_fit():
    for xs, ys in (
        ([torch.ones(3), torch.ones(2)], [torch.ones(3), torch.ones(5)]),
        ([torch.ones(3)], [torch.ones(2, 3)]),
        ([torch.ones(3, dtype=torch.int64)], [torch.ones(3)]),
        ([torch.ones(3)], [torch.ones(3, dtype=torch.complex64)]),
        ([torch.ones(3).expand(2, 3)], [torch.ones(2, 3)]),
    ):
        there = on_device(ys)
        mine = [x.to(DEVICE) for x in xs]
        if xs[0].dim() == 2:
            mine = [torch.ones(3, device=DEVICE).expand(2, 3)]
        with pytest.raises(RuntimeError):
            torch._foreach_add_(xs, ys)
        with pytest.raises(RuntimeError):
            torch._foreach_add_(mine, there)
        torch.openreg.synchronize()


def test_foreach_refuses_numbers_that_do_not_fit():
    x = torch.ones(3, device=DEVICE)
    for bad in (1j, [1j], torch.tensor(1j, device=DEVICE)):
        with pytest.raises(RuntimeError):
            torch._foreach_add_([x], bad)
    with pytest.raises(RuntimeError, match="0 dim"):
        torch._foreach_add_([x], torch.ones(3, device=DEVICE))
    torch.openreg.synchronize()
    assert x.tolist() == [1.0] * 3


def test_fused_optimizer_refuses_lists_of_different_lengths():
    options = dict.fromkeys(("weight_decay", "momentum", "dampening"), 0.0)
    options |= dict.fromkeys(("nesterov", "maximize", "is_first_step"), False)
    xs = [torch.ones(3, device=DEVICE) for _ in range(2)]
    with pytest.raises(RuntimeError, match=r"grads\.size"):
        torch._fused_sgd_(xs, xs[:1], [], lr=0.1, **options)
    torch.openreg.synchronize()


# ---- Other lists ----


def test_foreach_takes_mixed_dtypes_and_shapes():
    xs = [values((3,), torch.float32), values((2, 2), torch.float64), values((4,), torch.bfloat16)]
    ys = [values((3,), torch.float64), values((1, 2), torch.float32), values((1,), torch.float32)]
    for op in (torch._foreach_add, torch._foreach_mul, torch._foreach_div, torch._foreach_maximum):
        compare(op(on_device(xs), on_device(ys)), op(xs, ys))
    for op in (torch._foreach_add_, torch._foreach_mul_):
        mine = on_device(xs)
        for _ in range(3):
            op(mine, on_device(ys))
            op(xs, ys)
        compare(mine, xs)


def test_foreach_takes_views():
    z = torch.randn(4, 3, dtype=torch.complex64)
    there = z.to(DEVICE)

    def views(z):
        return [z.conj(), z.t(), z[::2, 1:]]

    def real_views(z):
        return [z.conj().imag, z.real, z.imag[0, 0]]

    for _ in range(2):
        for op in (torch._foreach_neg, torch._foreach_sin, torch._foreach_abs):
            compare(op(views(there)), op(views(z)))
            compare(op(real_views(there)), op(real_views(z)))
        compare(torch._foreach_add(views(there), views(there)), torch._foreach_add(*[views(z)] * 2))
    for base in (z, there):
        torch._foreach_mul_(views(base)[1:], 0.5)
        torch._foreach_add_(real_views(base)[1:], real_views(base)[1:])
        for lists in (
            views(base),
            real_views(base),
        ):  # PyTorch writes through no such bit of a list
            with pytest.raises(RuntimeError, match="mutable TensorList"):
                torch._foreach_mul_(lists, 2.0)
    compare([there], [z])


def test_foreach_takes_the_same_tensor_twice():
    results = []
    for device in ("cpu", DEVICE):
        x, y = torch.arange(6.0, device=device), torch.ones(3, device=device)
        torch._foreach_add_([x, x], 1)
        torch._foreach_mul_([x[:3], x[:3], y], [y, y, y])
        torch._foreach_add_([x[:3], x[3:]], [x[3:], x[:3]])
        results.append([x, y, *torch._foreach_add([x, x], [x, x])])
    compare(results[1], results[0])


def test_foreach_takes_numbers_in_cpu_tensors():
    xs = [torch.ones(3), torch.ones(2)]
    mine = on_device(xs)
    torch._foreach_mul_(mine, torch.tensor(3.0))
    torch._foreach_add_(mine, [torch.tensor(1.0), torch.tensor(2.0)])
    torch._foreach_addcmul_(mine, mine, mine, torch.tensor([1.0, 2.0]))
    assert [x.tolist() for x in mine] == [[20.0] * 3, [55.0] * 2]


@two_devices
def test_foreach_lists_on_several_devices_go_one_by_one(runs_ahead):
    xs = [torch.ones(3, device=DEVICE), torch.ones(2, device=OTHER), torch.ones(4)]
    runs_ahead(lambda: torch._foreach_add_(xs, 1))
    torch._foreach_mul_(xs, [x * 2 for x in xs])
    torch.openreg.synchronize(1)
    assert [(x.device.type, x.device.index) for x in xs] == [
        ("openreg", 0),
        ("openreg", 1),
        ("cpu", None),
    ]
    assert [x.tolist() for x in torch._foreach_sqrt([x * 2 for x in xs])] == [
        [4.0] * 3,
        [4.0] * 2,
        [4.0] * 4,
    ]


@two_devices
@pytest.mark.parametrize("other", [OTHER, "cpu"])
def test_foreach_pairs_on_two_devices_name_both(other):
    x, y = torch.ones(3, device=DEVICE), torch.ones(3, device=other)
    for op in (torch._foreach_add, torch._foreach_add_, torch._foreach_maximum):
        with pytest.raises(RuntimeError, match=rf"two devices, (openreg:0 and {other}|{other})"):
            op([x, x], [x, y])
    torch.openreg.synchronize()
    assert y.tolist() == [1.0] * 3


def test_foreach_operators_have_the_cpus_gradients():
    results = []
    for device in ("cpu", DEVICE):
        x = torch.linspace(0.1, 1, 4).to(device).requires_grad_()
        y = torch.linspace(1, 2, 3).to(device).requires_grad_()
        out = torch._foreach_mul(torch._foreach_sqrt([x, y]), 3.0)
        norms = torch._foreach_norm(torch._foreach_addcdiv(out, out, [x, y], 2.0))
        results.append(torch.autograd.grad(sum(norms), [x, y]))
    compare(results[1], results[0])


@pytest.mark.parametrize("library", ["libvendor_nomap.so"])
def test_foreach_works_on_a_device_that_kernels_cannot_reach(plugins, library, run_ok):
    program = """
        import torch
        xs = [torch.ones(3, device="openreg"), torch.ones(2, device="openreg")]
        torch._foreach_add_(xs, [x * 2 for x in xs], alpha=2)
        print([x.tolist() for x in torch._foreach_sqrt(torch._foreach_sub(xs, 1))])
        x = torch.arange(4.0, device="openreg")
        torch._foreach_add_([x[:2], x[2:], x[:2]], [x[2:], x[:2], x[2:]])
        print(x.tolist())
        torch.manual_seed(3)
        expected = torch.rand(4, device="openreg")
        torch.manual_seed(3)
        try:
            x.bernoulli_(2.0)
        except RuntimeError:
            print(torch.equal(torch.rand(4, device="openreg"), expected))
    """
    out = run_ok(program, {"OPENREG_PLUGIN": str(plugins / library)})
    x = torch.arange(4.0)
    torch._foreach_add_([x[:2], x[2:], x[:2]], [x[2:], x[:2], x[2:]])
    assert out == f"[[2.0, 2.0, 2.0], [2.0, 2.0]]\n{x.tolist()}\nTrue\n"


# ---- Versions, by which autograd knows what was changed ----


def versions(made):
    lists = [value for value in made if isinstance(value, list)]
    return [x._version for items in lists for x in items if isinstance(x, torch.Tensor)]


@pytest.mark.parametrize("name", IN_PLACE)
def test_foreach_versions_count_each_write(name):
    op = OPERATORS[name]
    size = next(unseen_sizes)
    for dtype in (torch.float32, torch.int64):
        made = arguments(op, dtype, [(size,), (2, size)])
        there = on_device(copy.deepcopy(made))
        for _ in range(3):  # the first call may wait, later ones are remembered
            if isinstance(outcome(op, made), type):
                break
            op(*there)
            assert versions(there) == versions(made)
            assert versions(there)[0] > 0
    torch.openreg.synchronize()


def test_foreach_versions_count_outputs_and_not_what_is_read():
    x, out = torch.zeros(3, device=DEVICE), torch.zeros(3, device=DEVICE)
    for _ in range(2):
        torch.ops.aten._foreach_add.Scalar_out([x], 1, out=[out])
        torch._foreach_norm([x])
        torch._foreach_sqrt([x])
    assert (x._version, out._version) == (0, 2)


def test_foreach_versions_count_views_and_a_tensor_twice():
    x = torch.zeros(4, device=DEVICE)
    torch._foreach_add_([x, x], 1)
    torch._foreach_zero_([x[:2], x[2:]])
    assert x._version == 4


@two_devices
def test_foreach_versions_count_lists_on_several_devices():
    xs = [torch.ones(3, device=DEVICE), torch.ones(2, device=OTHER)]
    for _ in range(2):
        torch._foreach_add_(xs, 1)
    assert [x._version for x in xs] == [2, 2]


def test_foreach_refuses_writes_to_inference_tensors_outside():
    with torch.inference_mode():
        x = torch.zeros(3, device=DEVICE)
        torch._foreach_add_([x], 1)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="Inplace update to inference tensor"):
            torch._foreach_add_([x], 1)
    assert x.tolist() == [1.0] * 3


@pytest.mark.parametrize("library", ["libvendor_nomap.so"])
def test_foreach_versions_count_on_a_device_that_kernels_cannot_reach(plugins, library, run_ok):
    program = """
        import torch
        x = torch.ones(3, device="openreg")
        torch._foreach_add_([x], 1)
        torch._foreach_add_([x], 1)
        print(x._version)
    """
    assert run_ok(program, {"OPENREG_PLUGIN": str(plugins / library)}) == "2\n"


@pytest.mark.parametrize("warm", [False, True], ids=["first", "later"])
@pytest.mark.parametrize("foreach", [None, True, False], ids=str)
def test_optimizer_step_between_forward_and_backward_is_refused(foreach, warm):
    size = next(unseen_sizes)
    a, b = (torch.nn.Linear(size, size, device=DEVICE) for _ in range(2))
    optimizer = torch.optim.SGD(b.parameters(), lr=1.0, foreach=foreach)
    for _ in range(1 + warm):
        loss = b(torch.tanh(a(torch.ones(1, size, device=DEVICE)))).sum()
        loss.backward(retain_graph=True)
        optimizer.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_clipped_gradients_that_autograd_has_kept_are_refused():
    x = torch.ones(3, device=DEVICE, requires_grad=True)
    x.grad = torch.full((3,), 5.0, device=DEVICE)
    y = (x * x.grad).sum()
    before = x.grad._version
    torch.nn.utils.clip_grad_norm_([x], 1.0)
    assert x.grad._version == before + 1
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.backward()


# ---- Optimizers ----


def optimizers(setting):
    return {
        name: kind
        for name, kind in vars(torch.optim).items()
        if inspect.isclass(kind) and setting in inspect.signature(kind).parameters
    }


CASES = [(name, "foreach") for name in optimizers("foreach")]
CASES += [(name, "fused") for name in optimizers("fused")]


def make(name, setting, model, **options):
    return getattr(torch.optim, name)(model.parameters(), **{setting: True}, **options)


def new_model():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Tanh(), torch.nn.Linear(8, 3))


def step(model, optimizer, x, y, scaler=None):
    optimizer.zero_grad()
    loss = F.mse_loss(model(x), y)
    if scaler is None:
        loss.backward()
    else:
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1, foreach=True)
    if scaler is None:
        optimizer.step()
    else:
        scaler.step(optimizer)
        scaler.update()


def test_optimizers_with_foreach_and_fused_are_tested():
    assert len(optimizers("foreach")) >= 12
    assert set(optimizers("fused")) >= {"Adam", "AdamW", "SGD", "Adagrad"}


@pytest.mark.parametrize("scaled", [False, True], ids=["", "scaled"])
@pytest.mark.parametrize(("name", "setting"), CASES)
def test_optimizer_takes_five_steps_as_on_the_cpu(name, setting, scaled):
    models = []
    for device in ("cpu", DEVICE):
        model = new_model().to(device)
        x, y = torch.randn(4, 6).to(device), torch.randn(4, 3).to(device)
        optimizer = (
            make(name, setting, model, weight_decay=0.01)
            if name != "Rprop"
            else make(name, setting, model)
        )
        scaler = torch.amp.GradScaler(device, init_scale=256.0) if scaled else None
        for _ in range(5):
            step(model, optimizer, x, y, scaler)
        models.append((list(model.parameters()), optimizer.state_dict()["state"]))
    (expected, state), (got, mine) = models
    compare([p.detach() for p in got], [p.detach() for p in expected])
    for key, entries in state.items():
        for entry, value in entries.items():
            if isinstance(value, torch.Tensor):
                torch.testing.assert_close(mine[key][entry].cpu(), value, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("name", "setting"), [("SGD", "foreach"), ("AdamW", "fused")])
def test_optimizer_leaves_out_a_step_with_infinite_gradients(name, setting):
    model = new_model().to(DEVICE)
    optimizer = make(name, setting, model)
    scaler = torch.amp.GradScaler(DEVICE, init_scale=256.0)
    before = [p.detach().clone() for p in model.parameters()]
    for p in model.parameters():
        p.grad = torch.full_like(p, float("inf"))
    scaler.scale(torch.ones((), device=DEVICE))
    scaler.step(optimizer)
    scaler.update()
    assert all(map(torch.equal, model.parameters(), before))
    assert scaler.get_scale() == 128.0


@pytest.mark.parametrize(
    ("name", "setting"), [("SGD", "foreach"), ("SGD", "fused"), ("AdamW", "fused")]
)
def test_optimizer_runs_ahead_at_its_first_step(name, setting, runs_ahead):
    size = next(unseen_sizes)
    model = torch.nn.Linear(size, 3).to(DEVICE)
    optimizer = make(name, setting, model)
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    torch.openreg.synchronize()
    runs_ahead(optimizer.step)


@pytest.mark.usefixtures("nothing_left")
@pytest.mark.parametrize(("name", "setting"), [("Adam", "foreach"), ("Adam", "fused")])
def test_optimizer_steps_do_not_grow_memory(name, setting):
    model = new_model().to(DEVICE)
    optimizer = make(name, setting, model)
    x, y = torch.randn(4, 6, device=DEVICE), torch.randn(4, 3, device=DEVICE)

    def run():
        for _ in range(20):
            step(model, optimizer, x, y)
        optimizer.zero_grad()
        torch.openreg.synchronize()
        return torch.openreg.memory_allocated(), torch.openreg.memory_reserved()

    run()
    settled = run()
    assert [run() for _ in range(3)] == [settled] * 3
