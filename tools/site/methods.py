"""A page for each method: its paragraph in docs/methods.md and its hyper-parameters."""

import re
from collections.abc import Callable
from pathlib import Path

from dosapp import METHODS

DOCS = Path(__file__).parents[2] / "docs"
PHASES = {
    "labelled": "trains with labels",
    "unlabelled": "adapts to the stream, after any labelled method",
    "both": "trains with labels and adapts to the stream",
    "none": "never trains",
}


def write_index() -> str:
    """The table of all methods."""
    lines = [
        "# All methods",
        "",
        "From the registry. [Methods](../methods.md) compares them on the embedded benchmark.",
        "",
        "| method | idea | phase | reference |",
        "|---|---|---|---|",
    ]
    for name, cls in METHODS.items():
        lines.append(
            f"| [{name}]({name}.md) | {cls.summary} | {PHASES[cls.phase]} | {cls.reference} |"
        )
    return "\n".join(lines) + "\n"


def write_method(name: str) -> str:
    """Facts of the registry, the paragraph of the overview, and the hyper-parameters."""
    cls = METHODS[name]
    text = (DOCS / "methods.md").read_text()
    (paragraph,) = [p for p in text.split("\n\n") if re.search(rf"(^|\s)\*\*{name}\*\*", p)][:1]
    paragraph = re.sub(r"\]\((?=#)", "](../methods.md", paragraph)
    paragraph = re.sub(r"\]\((?!\w+:|\.\./methods)", "](../", paragraph)
    file = f"../../src/{cls.__module__.replace('.', '/')}.py"
    option = "adapt" if cls.phase == "unlabelled" else "method"
    labelled = "--method spu " if cls.phase == "unlabelled" else ""
    stores = "It stores images of the stream." if cls.stores_data else "It stores no images."
    lines = [
        f"# {name}",
        "",
        f"*{cls.reference}.* {cls.summary[0].upper()}{cls.summary[1:]}.",
        f"It {PHASES[cls.phase]}. {stores}",
        "",
        "```sh",
        f"dosapp run {labelled}--{option} {name}",
        "```",
        "",
        paragraph,
        "",
        f"[Source]({file}) · [results of all methods](../methods.md)",
        "",
    ]
    options = cls().hyperparameters()
    if options:
        lines += ["## Hyper-parameters", "", "| `--set` | default |", "|---|---|"]
        lines += [f"| `{key.rpartition('.')[2]}` | `{value}` |" for key, value in options.items()]
    return "\n".join(lines) + "\n"


def _page(name: str) -> Callable[[], str]:
    return lambda: write_method(name)


PAGES = {"methods/index.md": write_index} | {f"methods/{name}.md": _page(name) for name in METHODS}
