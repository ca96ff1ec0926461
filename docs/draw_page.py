"""Draws docs/race.svg: the page of the race in README.md, inside an SVG file.

python docs/draw_page.py [docs/race.svg]

A browser shows HTML inside of SVG in an image, too, and follows light and dark there.
"""

import re
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
WIDTH, HEIGHT = 1040, 400
STYLE = "h1{margin-top:0}.hint,details{display:none}"
RUN = """
import runpy, torch
torch.openreg.sanitizer.enable("warn")
runpy.run_path("scale.py")
torch.openreg.sanitizer.save_reports("race.html")
"""


def page():
    """The page of the first program of the README."""
    program = re.search(r"```python\n(.*?)```", (HERE.parent / "README.md").read_text(), re.DOTALL)
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "scale.py").write_text(program[1])
        subprocess.run([sys.executable, "-W", "ignore", "-c", RUN], cwd=folder, check=True)
        return Path(folder, "race.html").read_text()


def svg(html):
    title, style = (re.search(rf"<{tag}>(.*?)</{tag}>", html, re.DOTALL)[1] for tag in
                    ("title", "style"))  # fmt: skip
    main = re.search(r"<body>(.*</main>)", html, re.DOTALL)[1].replace("<br>", "<br/>")
    yield (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" '
        f'width="{WIDTH}" height="{HEIGHT}" role="img" aria-label="{title}">'
    )
    style = style.replace("(min-width:70rem)", "all")  # whatever the image is scaled to
    yield f"<title>{title}</title>\n<style>{style}{STYLE}</style>"
    yield '<foreignObject width="100%" height="100%">'
    yield f'<body xmlns="http://www.w3.org/1999/xhtml">{main}</body>'
    yield "</foreignObject>\n</svg>\n"


if __name__ == "__main__":
    path = Path(sys.argv[1]) if len(sys.argv) > 1 else HERE / "race.svg"
    path.write_text("\n".join(svg(page())))
