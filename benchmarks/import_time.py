"""What the installed package adds to `import torch`: the processor time of a whole process with it
and without it, in turns."""

import json
import os
import resource
import statistics
import subprocess
import sys

PAIRS = 9


def processor_time(autoload):
    environment = {**os.environ, "TORCH_DEVICE_BACKEND_AUTOLOAD": autoload}
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run([sys.executable, "-c", "import torch"], env=environment, check=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return (after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime) * 1000


def main():
    times = [(processor_time("0"), processor_time("1")) for _ in range(PAIRS)]
    added = statistics.median(with_it for _, with_it in times)
    added -= statistics.median(without for without, _ in times)
    result = {"name": "import torch with the package, processor time on top", "value": added}
    print(json.dumps({**result, "unit": "ms", "limit": 20}))


if __name__ == "__main__":
    main()
