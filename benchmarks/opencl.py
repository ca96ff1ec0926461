"""The OpenCL driver against the same OpenCL calls in a C program, in turns. The program's times are
the floors, and limits are multiples of them."""

import json
import os
import subprocess
import sys
import tempfile
import time

HERE = os.path.dirname(os.path.abspath(__file__))
SOURCE = os.path.join(os.path.dirname(HERE), "plugins", "opencl")
MIB64 = 16 << 20  # float32
SECONDS = float(os.environ.get("OPENCL_SECONDS", "3"))  # of turns, for each figure


def build(folder):
    """The driver and the C program."""
    driver, program = os.path.join(folder, "driver.so"), os.path.join(folder, "opencl")
    make = ["make", "-s", "-C", SOURCE, f"OUT={driver}", f"PYTHON={sys.executable}"]
    subprocess.run(make, check=True)
    compile_ = ["cc", "-O2", "-std=c11", "-D_GNU_SOURCE", f"-I{SOURCE}", f"{HERE}/opencl.c"]
    subprocess.run([*compile_, "-o", program, "-lOpenCL"], check=True)
    return driver, program


class Program:
    """The C program."""

    def __init__(self, path):
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        self.process = subprocess.Popen([path, SOURCE], text=True, bufsize=1, **pipes)

    def measure(self, command, count):
        """The host's seconds, and those until all have finished."""
        print(command, count, file=self.process.stdin)
        return [float(seconds) for seconds in self.process.stdout.readline().split()]


def measure(step, count):
    import torch

    torch.openreg.synchronize()
    start = time.perf_counter()
    for _ in range(count):
        step()
    queued = time.perf_counter()
    torch.openreg.synchronize()
    return (queued - start) / count, (time.perf_counter() - start) / count


def in_turns(*runs):
    """The least time of each."""
    for run in runs:
        run()
    times, end = [], time.monotonic() + SECONDS
    while time.monotonic() < end or len(times) < 3:
        times.append([run() for run in runs])
    return map(min, zip(*times, strict=True))


def figures(program):
    """Name, unit, limit as a multiple of the program's time, the driver's time, the program's. A
    call of an operator takes longer in PyTorch itself than an empty launch: without a limit."""
    import torch

    def both(command, step, count=1, which=1):
        return in_turns(
            lambda: measure(step, count)[which], lambda: program.measure(command, count)[which]
        )

    x = torch.ones(1, device="openreg")
    host = torch.ones(MIB64).pin_memory()
    here, there = (torch.ones(MIB64, device="openreg") for _ in "ab")
    a, b, c = (torch.randn(1024, 1024, device="openreg") for _ in "abc")

    name = "host time of a launch (floor: of an empty one)"
    yield name, "us", None, *both("launch", x.relu_, 200, 0)
    name = "PyTorch's own part: the call on a CPU tensor (floor: of an empty launch)"
    yield name, "us", None, *both("launch", torch.ones(1).relu_, 200, 0)
    name = "a launch that begins when the one before ends"
    yield name, "us", 1.5, *both("launch-in-turn", x.relu_, 200)
    for name, command, step in (
        ("64 MiB to the device", "upload", lambda: here.copy_(host, non_blocking=True)),
        ("64 MiB to the host", "download", lambda: host.copy_(here, non_blocking=True)),
        ("64 MiB on the device", "move", lambda: there.copy_(here)),
        ("matmul of 1024", "multiply", lambda: torch.mm(a, b, out=c)),
    ):
        yield name, "ms", 1.1, *both(command, step)


def native():
    """How many times the native CPU's time, with all its cores, a product takes."""
    import torch

    factors = torch.randn(2, 1024, 1024)
    given = factors.to("openreg")

    def multiply():
        start = time.perf_counter()
        torch.mm(*factors)
        return time.perf_counter() - start

    ours, theirs = in_turns(lambda: measure(lambda: torch.mm(*given), 1)[1], multiply)
    return {"name": "OpenCL: matmul of 1024 / native CPU", "value": ours / theirs, "unit": "x"}


def results(program):
    for name, unit, times, value, floor in figures(program):
        row = {"value": value, "floor": floor, "limit": times and times * floor}
        scale = {"us": 1e6, "ms": 1e3}[unit]
        row = {key: seconds and seconds * scale for key, seconds in row.items()}
        yield {"name": f"OpenCL: {name}", "unit": unit, **row}
    yield native()


def main():
    with tempfile.TemporaryDirectory() as folder:
        driver, program = build(folder)
        os.environ |= {"OPENREG_PLUGIN": driver, "OPENREG_DEVICE_COUNT": "1"}
        for row in results(Program(program)):
            print(json.dumps(row), flush=True)


if __name__ == "__main__" and os.path.exists("/usr/include/CL/cl.h"):
    main()
