"""A 64x64 matmul on a lane, with one lane started and with all: a second OpenMP team would show."""

import json
import time

import torch

import torch_openreg  # noqa: F401

x = torch.randn(64, 64).to("openreg")


def matmul_us(calls=200, repeats=30):
    best = float("inf")
    for _ in range(repeats):
        torch.accelerator.synchronize()
        start = time.perf_counter()
        for _ in range(calls):
            x @ x
        torch.accelerator.synchronize()
        best = min(best, (time.perf_counter() - start) / calls)
    return best * 1e6


def start_all_lanes():
    limit = torch.openreg.get_device_properties(0).lanes
    for _ in range(limit):
        with torch.Stream("openreg:0"):
            y = torch.randn(256, 256, device="openreg")
            torch.openreg._sleep(50_000_000)
            y @ y
    torch.accelerator.synchronize()


matmul_us(repeats=3)
one = matmul_us()
start_all_lanes()
every = matmul_us()
print(json.dumps({"name": "64x64 matmul, one lane started", "value": one, "unit": "us"}))
row = {"name": "64x64 matmul, all lanes started", "value": every, "unit": "us", "limit": one * 1.25}
print(json.dumps(row))
