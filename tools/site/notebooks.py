"""Notebooks as pages: cells and their stored outputs. Nothing is executed here."""

import base64
import json
import re
from pathlib import Path

from mkdocs.structure.files import File


def to_markdown(file: File, repository: str) -> tuple[str, dict[str, bytes]]:
    """The notebook in Markdown, and its images by their address in the site."""
    stem = file.src_uri.removesuffix(".ipynb")
    cells = json.loads(Path(file.abs_src_path).read_text())["cells"]
    lines, images = [], {}
    for number, cell in enumerate(cells):
        source = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            lines += [source, ""]
            continue
        lines += ["```python", source, "```", ""]
        for output in cell["outputs"]:
            data = output.get("data", {})
            if "image/png" in data:
                uri = f"{stem}-{number}.png"
                images[uri] = base64.b64decode(data["image/png"])
                lines += [f"![{_title(source)}]({uri.rpartition('/')[2]})", ""]
            else:
                text = "".join(output.get("text", data.get("text/plain", "")))
                lines += ["```text", text.rstrip(), "```", ""]
    name = stem.rpartition("/")[2]
    note = f"*This page is a notebook: [{name}.ipynb]({repository}/blob/main/docs/{stem}.ipynb).*"
    return "\n".join([lines[0], "", note, "", *lines[1:]]), images


def _title(source: str) -> str:
    """The title of a figure, for readers who cannot see it."""
    found = re.search(r"set_title\(\"(.*?)\"\)|suptitle\(\"(.*?)\"\)", source)
    return next(filter(None, found.groups())) if found else "figure"
