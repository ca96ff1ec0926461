"""Draws docs/profiling.svg: two training steps of docs/examples/digits.py in torch.profiler.

OMP_NUM_THREADS=1 python docs/profile_digits.py [docs/profiling.svg]
"""

import json
import os
import sys
import tempfile
from html import escape
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE / "examples"))
import digits  # noqa: E402

DEVICE = torch.device("openreg:1")
WARM, DRAWN, TRIES = 20, 2, 10  # steps, steps, and of so many traces the shortest
WIDTH, LEFT, ROW, GAP = 960, 150, 30, 26
CALLS, ON_DEVICE = ("privateuse1_runtime",), ("kernel", "gpu_memcpy")

STYLE = """
    .page { fill: #ffffff; stroke: #d0d7de; }
    .row { fill: #f3f5f8; }
    .op { fill: #cfe3f8; stroke: #2f6db0; }
    .call { fill: #fbe3b4; stroke: #a9690b; }
    .kernel { fill: #d5efda; stroke: #2c7a43; }
    .gpu_memcpy { fill: #f6d5e6; stroke: #a3296b; }
    .arrow { fill: none; stroke: #57606a; stroke-width: 0.6; opacity: 0.55; }
    text { fill: #1f2328; }
    .dim { fill: #57606a; font-size: 11px; }
    .in { font-size: 10px; }
    @media (prefers-color-scheme: dark) {
      .page { fill: #0d1117; stroke: #30363d; }
      .row { fill: #161b22; }
      .op { fill: #12345a; stroke: #6cb0f5; }
      .call { fill: #4a3305; stroke: #e0a83a; }
      .kernel { fill: #10381d; stroke: #56d37a; }
      .gpu_memcpy { fill: #4a1234; stroke: #f07ab8; }
      .arrow { stroke: #9ea7b1; }
      text { fill: #e6edf3; }
      .dim { fill: #9ea7b1; }
    }"""


def trained(steps):
    images, labels = digits.load_split(0)[0]
    data = images[: steps * digits.BATCH_SIZE], labels[: steps * digits.BATCH_SIZE]
    digits.train(trained.model, data, DEVICE, 1, torch.Generator().manual_seed(0))


def traced():
    """The events of the Chrome trace of some steps."""
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.PrivateUse1]) as p:
        trained(DRAWN)
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "trace.json")
        p.export_chrome_trace(path)
        return json.loads(Path(path).read_text())["traceEvents"]


def pictures():
    torch.manual_seed(0)
    with torch.accelerator.device_index(DEVICE.index):
        trained.model = digits.make_model().to(DEVICE)
        trained(WARM)
        for _ in range(TRIES):
            yield Picture(traced())


def row_of(event):
    return event["pid"], event["tid"]


def outermost(slices):
    """The slices that lie in no other one of their row."""
    kept, ends = [], {}
    for s in sorted(slices, key=lambda s: (s["ts"], -s["dur"])):
        if s["ts"] >= ends.get(row_of(s), 0):
            kept.append(s)
            ends[row_of(s)] = s["ts"] + s["dur"]
    return kept


class Picture:
    def __init__(self, events):
        names = {row_of(e): e["args"]["name"] for e in events if e.get("name") == "thread_name"}
        slices = [e for e in events if e["ph"] == "X" and isinstance(e["tid"], int)]
        host = [s for s in slices if s["pid"] == os.getpid()]
        device = [s for s in slices if s["pid"] == DEVICE.index and s["cat"] in ON_DEVICE]
        # From the first copy to the last kernel: neither the data's making nor the wait at the end.
        copies = [s["ts"] for s in host if s["name"] == "orMemcpyAsync"]
        self.begin = min(copies) - 300
        self.end = max(s["ts"] + s["dur"] for s in device) + 50
        shown = outermost([s for s in host if s["cat"] not in CALLS and self.within(s)])
        self.calls = [s for s in host if s["cat"] in CALLS and self.within(s)]
        self.slices = shown + device
        self.starts = {e["id"]: e for e in events if e["ph"] == "s" and e["cat"] == "ac2g"}
        self.ends = {e["id"]: e for e in events if e["ph"] == "f" and e["cat"] == "ac2g"}
        rows = sorted({row_of(s) for s in self.slices}, key=lambda r: (r[0] != os.getpid(), r))
        self.y = {row: 58 + i * (ROW + GAP) for i, row in enumerate(rows)}
        main = os.getpid()
        self.labels = {
            row: ("host", "main thread" if row[1] == main else "backward's thread")
            if row[0] == main
            else (f"openreg:{row[0]}", names[row])
            for row in rows
        }
        self.height = 58 + len(rows) * (ROW + GAP)

    def within(self, s):
        return s["ts"] < self.end and s["ts"] + s["dur"] > self.begin

    def x(self, ts):
        ts = min(max(ts, self.begin), self.end)
        return LEFT + (ts - self.begin) / (self.end - self.begin) * (WIDTH - LEFT - 16)

    @staticmethod
    def rect(kind, x, y, width, height, rest="/>"):
        at = f'x="{x:.1f}" y="{y}" width="{width:.1f}" height="{height}"'
        return f'<rect class="{kind}" {at} stroke-width="0.6"{rest}'

    def slice(self, s, kind, inset=0):
        x, y = self.x(s["ts"]), self.y[row_of(s)] + inset
        width = max(self.x(s["ts"] + s["dur"]) - x, 0.8)
        name = escape(s["name"].split("evaluate_function: ")[-1].removeprefix("aten::"))
        title = f"><title>{name}, {s['dur']:.0f} us</title></rect>"
        yield self.rect(kind, x, y, width, ROW - 2 * inset, title)
        if width > 6 * len(name) + 4 and not inset:
            yield f'<text class="in" x="{x + 3:.1f}" y="{y + 19}">{name}</text>'

    def arrows(self):
        for key, start in self.starts.items():
            end = self.ends.get(key)
            inside = end and self.begin <= start["ts"] and end["ts"] <= self.end
            if inside and row_of(start) in self.y:
                y = self.y[row_of(start)] + ROW, self.y[row_of(end)]
                x = self.x(start["ts"]), self.x(end["ts"])
                yield f'<path class="arrow" d="M{x[0]:.1f} {y[0]}L{x[1]:.1f} {y[1]}"/>'

    def svg(self):
        took = (self.end - self.begin) / 1000
        yield (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {self.height}" '
            'font-family="system-ui, sans-serif" font-size="13" role="img" aria-labelledby="title">'
        )
        yield '<title id="title">Two training steps of the digits example in torch.profiler</title>'
        yield f"<style>{STYLE}\n</style>"
        yield self.rect("page", 0.5, 0.5, WIDTH - 1, self.height - 1, ' rx="8"/>')
        yield f'<text x="20" y="30">two training steps, {took:.1f} ms</text>'
        legend = (
            ("op", "operator"),
            ("call", "call"),
            ("kernel", "kernel"),
            ("gpu_memcpy", "copy"),
        )
        for i, (kind, text) in enumerate(legend):
            x = WIDTH - 400 + i * 100
            yield self.rect(kind, x, 18, 14, 14)
            yield f'<text class="dim" x="{x + 20}" y="30">{text}</text>'
        for row, y in self.y.items():
            owner, name = self.labels[row]
            yield self.rect("row", LEFT, y, WIDTH - LEFT - 16, ROW)
            yield f'<text x="20" y="{y + 12}">{owner}</text>'
            yield f'<text class="dim" x="20" y="{y + 27}">{name}</text>'
        for s in self.slices:
            on_host = s["pid"] == os.getpid()
            kind = "op" if on_host else s["cat"] if s["cat"] == "gpu_memcpy" else "kernel"
            yield from self.slice(s, kind)
        for s in self.calls:
            yield from self.slice(s, "call", inset=11)
        yield from self.arrows()
        yield "</svg>"


def main():
    path = Path(sys.argv[1]) if len(sys.argv) > 1 else HERE / "profiling.svg"
    shortest = min(pictures(), key=lambda picture: picture.end - picture.begin)
    path.write_text("\n".join(shortest.svg()) + "\n")
    print(f"{path}: {path.stat().st_size / 1000:.0f} kB")


if __name__ == "__main__":
    main()
