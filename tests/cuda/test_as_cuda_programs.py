"""Programs that say "cuda", run as they are: python -m torch_openreg run --as-cuda."""

import re
import textwrap

import pytest

RUN = ("-m", "torch_openreg", "run", "--as-cuda")
WATCHED = (
    "torch_openreg: sanitizer: no mistakes found in the order of accesses of 1 process on "
    "openreg:0\n"
)


@pytest.fixture
def script(tmp_path):
    def script(text, name="program.py"):
        path = tmp_path / name
        path.write_text(textwrap.dedent(text))
        return path

    return script


@pytest.fixture
def run_as_cuda(run):
    """Runs a script; its output, if it ends well and says nothing on stderr."""

    def run_as_cuda(path, *arguments, options=()):
        done = run("", arguments=(*RUN, *options, path, *arguments))
        assert (done.code, done.err) == (0, ""), f"{done.out}\n{done.err}"
        return done.out

    return run_as_cuda


# As PyTorch's examples/mnist and torchvision's references write it, with the images made up.
MNIST = """
    import argparse
    import torch
    import torch.nn as nn
    import torch.nn.functional as F
    from torch.utils.data import DataLoader, TensorDataset


    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv, self.norm = nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4)
            self.dropout, self.fc = nn.Dropout(0.1), nn.Linear(4 * 9, 2)

        def forward(self, x):
            x = F.max_pool2d(F.relu(self.norm(self.conv(x))), 2)
            return F.log_softmax(self.fc(self.dropout(torch.flatten(x, 1))), dim=1)


    class Prefetcher:
        def __init__(self, loader, device):
            self.loader, self.device = iter(loader), device
            self.stream = torch.cuda.Stream(device)
            self.preload()

        def preload(self):
            self.batch = next(self.loader, None)
            if self.batch is None:
                return
            with torch.cuda.stream(self.stream):
                self.batch = [t.cuda(self.device, non_blocking=True) for t in self.batch]

        def __iter__(self):
            while self.batch is not None:
                torch.cuda.current_stream(self.device).wait_stream(self.stream)
                batch = self.batch
                for tensor in batch:
                    tensor.record_stream(torch.cuda.current_stream(self.device))
                self.preload()
                yield batch


    def main():
        parser = argparse.ArgumentParser()
        parser.add_argument("--no-cuda", action="store_true")
        parser.add_argument("--epochs", type=int, default=4)
        args = parser.parse_args()
        use_cuda = not args.no_cuda and torch.cuda.is_available()
        assert use_cuda
        torch.manual_seed(1)
        torch.backends.cudnn.benchmark = True
        device = torch.device("cuda:0")
        images = torch.randn(128, 1, 8, 8)
        labels = (images.mean((1, 2, 3)) > 0).long()
        images += labels.view(-1, 1, 1, 1)
        loader = DataLoader(TensorDataset(images, labels), 32, shuffle=True, pin_memory=True)
        model = Net().to(device)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.9)
        scaler = torch.amp.GradScaler("cuda")
        for epoch in range(args.epochs):
            model.train()
            for data, target in Prefetcher(loader, device):
                optimizer.zero_grad(set_to_none=True)
                with torch.autocast(device_type="cuda", dtype=torch.float16):
                    loss = F.nll_loss(model(data), target)
                scaler.scale(loss).backward()
                scaler.step(optimizer)
                scaler.update()
            scheduler.step()
        model.eval()
        with torch.no_grad():
            output = model(images.cuda())
        right = output.argmax(1).eq(labels.to(device)).float().mean().item()
        torch.save(model.state_dict(), "PATH")
        assert next(iter(torch.load("PATH", map_location="cuda:0").values())).is_cuda
        print("learned" if right > 0.9 else right, torch.cuda.max_memory_allocated() > 0)


    if __name__ == "__main__":
        main()
"""


def test_prefetching_loop_trains_and_has_no_race(run, script, tmp_path):
    path = script(MNIST.replace("PATH", str(tmp_path / "model.pt")))
    done = run("", arguments=(*RUN, "--sanitize", path, "--epochs", "4"))
    assert (done.code, done.out) == (0, "learned True\n"), done.err
    assert done.err == WATCHED


WAIT = """torch.cuda.current_stream(self.device).wait_stream(self.stream)
                batch"""


@pytest.mark.racy
def test_missing_wait_stream_is_reported_at_its_line(run, script, tmp_path):
    text = MNIST.replace("PATH", str(tmp_path / "model.pt"))
    assert WAIT in text
    path = script(text.replace(WAIT, "batch"))
    done = run("", arguments=(*RUN, "--sanitize", path, "--epochs", "1"))
    assert done.code == 1
    (first,) = [line for line in done.err.splitlines() if line.startswith("torch_openreg:   1: ")]
    lines = path.read_text().splitlines()
    copies = 1 + next(i for i, line in enumerate(lines) if "non_blocking" in line)
    uses = 1 + next(i for i, line in enumerate(lines) if "self.norm(self.conv(x))" in line)
    hands_over = 1 + next(i for i, line in enumerate(lines) if "yield batch" in line)
    assert f"/program.py:{copies} and " in first and f"/program.py:{uses}: before " in first, first
    wait = "torch.cuda.current_stream().wait_stream(self.stream)"
    assert f"/program.py:{hands_over} add {wait}" in first, first


# As a pipeline of diffusers': modules that are moved for their part, and noise from a generator.
DIFFUSION = """
    import torch
    import torch.nn as nn
    import torch.nn.functional as F


    class UNet(nn.Module):
        def __init__(self):
            super().__init__()
            self.time, self.down = nn.Linear(1, 8), nn.Conv2d(4, 8, 3, padding=1)
            self.norm, self.up = nn.GroupNorm(2, 8), nn.Conv2d(8, 4, 3, padding=1)
            self.query = nn.Linear(8, 24)

        def forward(self, x, step):
            h = self.down(x) + self.time(step.view(1, 1).to(x.dtype))[..., None, None]
            h = F.silu(self.norm(h))
            q, k, v = self.query(h.flatten(2).transpose(1, 2)).chunk(3, dim=-1)
            h = h + F.scaled_dot_product_attention(q, k, v).transpose(1, 2).view_as(h)
            return self.up(h)


    @torch.no_grad()
    def sample(seed):
        generator = torch.Generator("cuda").manual_seed(seed)
        unet.to("cuda", dtype=torch.float16)
        latents = torch.randn(1, 4, 8, 8, generator=generator, device="cuda", dtype=torch.float16)
        for step in torch.linspace(1, 0, 4).to("cuda"):
            latents = latents - 0.1 * unet(latents, step)
        unet.to("cpu")  # as with model offloading
        torch.cuda.empty_cache()
        vae.to("cuda")
        upload = torch.cuda.Stream()
        done = torch.cuda.Event()
        done.record()
        with torch.cuda.stream(upload):
            upload.wait_event(done)
            latents.record_stream(upload)
            image = vae(latents.float())
        torch.cuda.current_stream().wait_stream(upload)
        return image.cpu()


    torch.manual_seed(0)
    unet, vae = UNet().eval(), nn.ConvTranspose2d(4, 3, 2, stride=2).eval()
    torch.backends.cuda.matmul.allow_tf32 = True
    one, two, other = sample(1), sample(1), sample(2)
    print(one.equal(two), one.equal(other), tuple(one.shape), bool(one.isfinite().all()))
"""


def test_diffusion_loop_runs_as_cuda(run, script):
    done = run("", arguments=(*RUN, "--sanitize", script(DIFFUSION)))
    assert (done.code, done.out) == (0, "True False (1, 3, 16, 16) True\n"), done.err
    assert done.err == WATCHED


@pytest.mark.slow
def test_run_as_cuda_takes_seeds_and_a_module(run, script, tmp_path, monkeypatch):
    text = """
        import os, sys, torch
        print(torch.ones(2).cuda().sum(), sys.argv[1:], os.environ.get("OPENREG_SCHEDULE_SEED"))
    """
    script(text, "said.py")
    monkeypatch.chdir(tmp_path)
    done = run("", arguments=(*RUN, "--seeds", "1", "-m", "said", "--seeds", "x"))
    assert done.code == 1
    assert done.out == "tensor(2., device='cuda:0') ['--seeds', 'x'] None\n"
    replay = "-m torch_openreg run --as-cuda -m said --seeds x\n"
    assert re.search(f"to replay: OPENREG_SCHEDULE_SEED=0 python .*{replay}", done.err)


def test_force_option_alone_is_refused(run):
    done = run("", arguments=("-m", "torch_openreg", "run", "--force", "x.py"))
    assert done.code == 2 and "--force belongs to --as-cuda" in done.err


def test_as_cuda_setting_is_shown(run_ok):
    shown = run_ok("", arguments=("-m", "torch_openreg"))
    assert "OPENREG_AS_CUDA = 0  (default)" in shown


def test_conftest_with_as_cuda_works_with_the_pytest_plugin(run, tmp_path):
    (tmp_path / "conftest.py").write_text("import torch_openreg\n\ntorch_openreg.as_cuda()\n")
    text = """
        import torch


        def test_race():
            x = torch.ones(100, device="cuda")
            with torch.cuda.stream(torch.cuda.Stream()):
                x *= 2
            torch.cuda.synchronize()


        def test_right():
            assert (torch.ones(100, device="cuda") * 2).sum().item() == 200
    """
    (tmp_path / "test_library.py").write_text(textwrap.dedent(text))
    options = ("-q", "--openreg-sanitizer", "-p", "no:cacheprovider", tmp_path)
    done = run("", arguments=("-m", "pytest", *options))
    assert done.code == 1 and "1 failed, 1 passed" in done.out, done.out
    assert "DataRaceError" in done.out and "test_library.py:8 " in done.out


SPAWNED = """
    import torch
    import torch.multiprocessing as mp
    from torch.utils.data import DataLoader, Dataset


    class Squares(Dataset):
        def __len__(self):
            return 4

        def __getitem__(self, index):
            # A worker knows the names, and computes on the CPU.
            assert torch.cuda.is_available() and torch.device("cuda:1").type == "cuda"
            return torch.tensor(float(index)) ** 2


    def child(rank, results):
        torch.cuda.set_device(rank + 1)
        results.put((rank, torch.ones(2).cuda().sum().item(), torch.cuda.current_device()))


    if __name__ == "__main__":
        context = mp.get_context("spawn")
        loader = DataLoader(
            Squares(), 2, num_workers=1, pin_memory=True, multiprocessing_context=context
        )
        print([batch.to("cuda", non_blocking=True).tolist() for batch in loader])
        results = context.SimpleQueue()
        mp.spawn(child, (results,), nprocs=1)
        print(results.get())
"""


@pytest.mark.slow
def test_workers_and_spawned_children_use_cuda(run_as_cuda, script):
    assert run_as_cuda(script(SPAWNED)).splitlines() == [
        "[[0.0, 1.0], [4.0, 9.0]]",
        "(0, 2.0, 1)",
    ]


# In the style of PyTorch's test/test_cuda.py, with its machinery.
PYTORCH_TESTS = """
    import torch
    from torch.testing._internal.autocast_test_lists import AutocastTestLists, TestAutocast
    from torch.testing._internal.common_cuda import TEST_CUDA, TEST_CUDNN, TEST_MULTIGPU
    from torch.testing._internal.common_device_type import (
        deviceCountAtLeast,
        instantiate_device_type_tests,
        onlyCUDA,
    )
    from torch.testing._internal.common_optimizers import optim_db, optims
    from torch.testing._internal.common_utils import TestCase, run_tests

    assert TEST_CUDA and TEST_MULTIGPU and not TEST_CUDNN


    class TestCuda(TestCase):
        _do_cuda_memory_leak_check = True
        _do_cuda_non_default_stream = True

        def test_stream(self):
            self.assertNotEqual(torch.cuda.current_stream(), torch.cuda.default_stream())
            x = torch.ones(10, device="cuda")
            torch.cuda._sleep(1000)
            self.assertEqual(x + 1, torch.full((10,), 2.0, device="cuda"))


    class TestCudaAutocast(TestAutocast):
        def setUp(self):
            super().setUp()
            self.lists = AutocastTestLists(torch.device("cuda:0"))

        def test_autocast_torch_fp32(self):
            for listed in self.lists.torch_fp32:
                op, args, kwargs = self.args_maybe_kwargs(listed)
                self._run_autocast_outofplace(
                    op, args, torch.float32, device="cuda", add_kwargs=kwargs,
                    amp_dtype=torch.float16,
                )

        def test_autocast_banned(self):
            with torch.autocast("cuda"):
                for op, args, module in self.lists.banned:
                    self.assertRaises(RuntimeError, getattr(module, op), *args)


    class TestDevices(TestCase):
        @onlyCUDA
        @deviceCountAtLeast(2)
        def test_several(self, devices):
            self.assertEqual([torch.ones(1, device=d).device.type for d in devices], ["cuda"] * 2)

        @onlyCUDA
        @optims([o for o in optim_db if o.optim_cls is torch.optim.Adam], dtypes=[torch.float32])
        def test_fused(self, device, dtype, optim_info):
            self.assertIn("cuda", optim_info.supports_fused_on)


    instantiate_device_type_tests(TestDevices, globals())
    # None under another name of the device.
    assert "TestDevicesCUDA" in globals() and "TestDevicesPRIVATEUSE1" not in globals()

    if __name__ == "__main__":
        run_tests()
"""


@pytest.mark.slow
def test_pytorchs_own_test_classes_run_as_cuda(run, script, monkeypatch):
    monkeypatch.delenv("CI", raising=False)  # with it run_tests() asks for an XML writer
    done = run("", arguments=(*RUN, script(PYTORCH_TESTS)))
    assert done.code == 0, done.err
    assert "Ran 7 tests" in done.err and "OK (skipped=2)" in done.err, done.err


# As the tutorials on CUDA graphs write it: the whole network, then parts of one.
GRAPHS = """
    import copy
    import torch

    torch.manual_seed(0)
    device = torch.device("cuda")
    model = torch.nn.Sequential(
        torch.nn.Linear(16, 32), torch.nn.ReLU(), torch.nn.Linear(32, 4)
    ).cuda()
    eager = copy.deepcopy(model)
    loss_fn = torch.nn.MSELoss()
    batches = [(torch.randn(8, 16), torch.randn(8, 4)) for _ in range(5)]

    static_input = torch.randn(8, 16, device="cuda")
    static_target = torch.randn(8, 4, device="cuda")


    def step(model, optimizer, x, y):
        optimizer.zero_grad(set_to_none=True)
        loss = loss_fn(model(x), y)
        loss.backward()
        optimizer.step()
        return loss


    def sgd(model):
        return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


    optimizer, eager_optimizer = sgd(model), sgd(eager)
    s = torch.cuda.Stream()
    s.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(s):
        for _ in range(3):
            step(model, optimizer, static_input, static_target)
    torch.cuda.current_stream().wait_stream(s)
    for _ in range(3):
        step(eager, eager_optimizer, static_input, static_target)

    g = torch.cuda.CUDAGraph()
    assert not torch.cuda.is_current_stream_capturing()
    pool = torch.cuda.graph_pool_handle()
    with torch.cuda.graph(g, pool=pool, capture_error_mode="thread_local"):
        assert torch.cuda.is_current_stream_capturing()
        static_loss = step(model, optimizer, static_input, static_target)
    assert isinstance(g, torch.cuda.CUDAGraph) and isinstance(g, torch.cuda.graphs.CUDAGraph)

    for data, target in batches:
        static_input.copy_(data)
        static_target.copy_(target)
        g.replay()
        assert static_loss.item() == step(eager, eager_optimizer, data.cuda(), target.cuda()).item()
    for a, b in zip(model.parameters(), eager.parameters()):
        assert torch.equal(a, b)

    x = torch.randn(8, 16, device=device, requires_grad=True)
    sample = torch.randn(8, 16, device=device, requires_grad=True)
    # PyTorch's function keeps the outputs of its warm-up, on another stream, while it captures.
    torch.autograd.graph.set_warn_on_accumulate_grad_stream_mismatch(False)
    graphed = torch.cuda.make_graphed_callables(copy.deepcopy(eager), (sample,))
    graphed(x).square().sum().backward()
    kept = x.grad.clone()
    x.grad = None
    eager(x).square().sum().backward()
    assert torch.equal(kept, x.grad)

    torch_graph = torch.accelerator.Graph()
    with torch.cuda.stream(s), torch_graph:
        doubled = static_input * 2
    torch_graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(doubled, static_input * 2)

    broken = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(broken):
            if static_loss.item() > 0:
                static_input.add_(1)
    except RuntimeError as error:
        print(*str(error).split())
"""


def test_cuda_graphs_capture_and_replay(script, run_as_cuda):
    said = run_as_cuda(script(GRAPHS))
    assert "capturing" in said and said.count("\n") == 1
