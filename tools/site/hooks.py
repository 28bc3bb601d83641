"""Hooks of MkDocs: pages from the code and from files beside docs/, and links that leave docs/."""

import posixpath
import re
from pathlib import Path
from typing import Any

import api
import commands
import notebooks
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

import methods

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
BESIDE = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "SECURITY.md": "security.md",
}
# `[text](target#part)`, and `[name]: target#part` on a line of its own
LINK = re.compile(
    r"(\]\(|^\[[^\]\n]+\]: )(?!\w+:|#)([^)#\s]+)((?:#[^)\n]*)?(?:\)|$))", flags=re.MULTILINE
)


def on_config(config: MkDocsConfig) -> None:
    """Add to the sections of the navigation what is generated, and pages that it does not name."""
    sections = {title: pages for section in config.nav for title, pages in section.items()}
    sections["Methods"] += list(methods.PAGES)
    sections["Reference"] += [*commands.PAGES, *api.PAGES]
    named = {page for pages in sections.values() for entry in pages for page in _targets(entry)}
    for page in sorted(path.relative_to(DOCS).as_posix() for path in DOCS.rglob("*.md")):
        if page not in named:
            sections["Tutorials" if page.startswith("tutorials/") else "Guides"].append(page)


def _targets(entry: Any) -> list[str]:
    return list(entry.values()) if isinstance(entry, dict) else [entry]


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the generated pages. Nothing of them is written to docs/."""
    pages = {**commands.PAGES, **api.PAGES, **methods.PAGES}
    pages |= {page: (lambda name=name: (ROOT / name).read_text()) for name, page in BESIDE.items()}
    for uri, write in pages.items():
        files.append(File.generated(config, uri, content=write()))
    for file in [f for f in files if f.src_uri.endswith(".ipynb")]:
        files.remove(file)
        page, images = notebooks.to_markdown(file, config.extra["repository"])
        files.append(File.generated(config, file.src_uri.replace(".ipynb", ".md"), content=page))
        for uri, content in images.items():
            files.append(File.generated(config, uri, content=content))
    return files


def on_page_markdown(markdown: str, *, page: Any, files: Files, config: MkDocsConfig) -> str:
    """Point links to files of the repository at their pages, or at the code host."""
    uri = page.file.src_uri
    origin = next((name for name, target in BESIDE.items() if target == uri), f"docs/{uri}")

    def translate(match: re.Match[str]) -> str:
        before, target, after = match.groups()
        path = posixpath.normpath(posixpath.join(posixpath.dirname(origin), target))
        inside = BESIDE.get(path) or path.removeprefix("docs/").replace(".ipynb", ".md")
        if path in BESIDE or (path.startswith("docs/") and files.get_file_from_path(inside)):
            return before + posixpath.relpath(inside, posixpath.dirname(uri) or ".") + after
        if not (ROOT / path).exists():
            return match[0]  # MkDocs reports it
        kind = "tree" if (ROOT / path).is_dir() else "blob"
        return f"{before}{config.extra['repository']}/{kind}/main/{path}{after}"

    return LINK.sub(translate, markdown)
