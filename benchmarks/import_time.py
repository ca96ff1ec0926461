"""What `import torch_openreg` takes on top of `import torch`: the median over fresh processes."""

import json
import os
import statistics
import subprocess
import sys

PROGRAM = """
import time, torch
start = time.perf_counter()
import torch_openreg
print((time.perf_counter() - start) * 1000)
"""
PROCESSES = 7


def main():
    environment = {**os.environ, "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
    command = [sys.executable, "-c", PROGRAM]
    times = [
        float(subprocess.run(command, env=environment, stdout=subprocess.PIPE, check=True).stdout)
        for _ in range(PROCESSES)
    ]
    result = {"name": "import on top of torch", "value": statistics.median(times)}
    print(json.dumps({**result, "unit": "ms", "limit": 150}))


if __name__ == "__main__":
    main()
