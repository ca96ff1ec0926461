"""Runs the benchmark programs, prints a table of what they measured, and draws it.

Each program, an executable or a Python script, prints one JSON object a line: name, value, unit,
and optionally limit (the most the value may be) and floor (what the machine itself takes for the
same, measured in the same run).

    python benchmarks/run.py PROGRAM... [--out build/bench]

The figures also go to OUT/results.json. The exit status is 1 if a program fails or a value is past
its limit; each of those is named. LIMITS=0 in the environment, for a busy machine: they are named,
and no failure.
"""

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path


def parse(text, program):
    """The results in a program's output; a line that is not one stops the run."""
    results = []
    for line in text.splitlines():
        if not line.strip():
            continue
        try:
            result = json.loads(line)
            result["name"], result["value"], result["unit"]
        except (ValueError, TypeError, KeyError) as error:
            raise SystemExit(f"{program} printed {line!r}, not a result ({error})") from None
        results.append(result)
    return results


def measure(programs):
    results = []
    for number, program in enumerate(programs, 1):
        print(f"[{number}/{len(programs)}] {program}", file=sys.stderr, flush=True)
        command = [sys.executable, program] if program.endswith(".py") else [program]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True)
        if done.returncode != 0:
            raise SystemExit(f"{program} failed with status {done.returncode}")
        results += parse(done.stdout, program)
    return results


def verdict(result):
    if result.get("limit") is None:
        return ""
    return "ok" if result["value"] <= result["limit"] else "OVER"


def number(value):
    return "-" if value is None else f"{value:.4g}" if abs(value) < 1e5 else f"{value:.3e}"


def table(results):
    rows = [("what", "measured", "limit", "floor", "unit", "")]
    for result in results:
        figures = [number(result.get(key)) for key in ("value", "limit", "floor")]
        rows.append((result["name"], *figures, result["unit"], verdict(result)))
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = []
    for row in rows:
        cells = [row[0].ljust(widths[0])]
        cells += [cell.rjust(width) for cell, width in zip(row[1:4], widths[1:4], strict=True)]
        cells += [row[4].ljust(widths[4]), row[5]]
        lines.append("  ".join(cells).rstrip())
    lines.insert(1, "-" * max(map(len, lines)))
    return "\n".join(lines)


def draw(results, path):
    """Each value as a fraction of its limit, so that different units share one axis."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    limited = [result for result in results if result.get("limit")][::-1]
    if not limited:
        return False
    figure, axes = pyplot.subplots(figsize=(9, 1.2 + 0.4 * len(limited)), layout="constrained")
    places = range(len(limited))
    shares = [result["value"] / result["limit"] for result in limited]
    colours = ["tab:blue" if share <= 1 else "tab:red" for share in shares]
    axes.barh(places, shares, color=colours, height=0.6)
    for place, result, share in zip(places, limited, shares, strict=True):
        text = f" {number(result['value'])} of {number(result['limit'])} {result['unit']}"
        axes.text(share, place, text, va="center", fontsize=8)
        if result.get("floor"):
            floor = result["floor"] / result["limit"]
            axes.plot([floor, floor], [place - 0.35, place + 0.35], color="black", linewidth=2)
    axes.axvline(1, color="grey", linestyle="--", linewidth=1)
    axes.set_yticks(places, [result["name"] for result in limited])
    axes.set_xlim(0, 1.35 * max(1, *shares))
    axes.set_xlabel("measured / limit (dashed: the limit; black: the machine's own floor)")
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=120)
    return True


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("programs", nargs="*")
    parser.add_argument("--out", type=Path, default=Path("build/bench"))
    options = parser.parse_args()
    if not options.programs:
        parser.error("no benchmark programs given")
    results = measure(options.programs)
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "results.json").write_text(json.dumps(results, indent=1) + "\n")
    print(table(results))
    plot = options.out / "results.png"
    if draw(results, plot):
        print(f"\nplot: {plot}")
    over = [result for result in results if verdict(result) == "OVER"]
    for result in over:
        figures = f"{number(result['value'])} of {number(result['limit'])} {result['unit']}"
        print(f"over its limit: {result['name']}: {figures}", file=sys.stderr)
    return 1 if over and os.environ.get("LIMITS") != "0" else 0


if __name__ == "__main__":
    sys.exit(main())
