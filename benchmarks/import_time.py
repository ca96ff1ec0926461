"""What the installed package adds to `import torch`, in processor time.

It is taken inside of processes that import the package after PyTorch: `import torch` alone takes a
second, and differs from itself by more than this. Bytecode is compiled before, as pip does for an
installed package.
"""

import compileall
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path

RUNS = 9
PROGRAM = """
import time, torch
before = time.process_time()
import torch_openreg
print(1000 * (time.process_time() - before))
"""


def processor_time():
    environment = {**os.environ, "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
    command = [sys.executable, "-c", PROGRAM]
    output = subprocess.run(command, env=environment, check=True, capture_output=True, text=True)
    return float(output.stdout)


def main():
    compileall.compile_dir(Path(__file__).parent.parent / "torch_openreg", quiet=1)
    added = statistics.median(processor_time() for _ in range(RUNS))
    result = {"name": "import torch with the package, processor time on top", "value": added}
    print(json.dumps({**result, "unit": "ms", "limit": 20}))


if __name__ == "__main__":
    main()
