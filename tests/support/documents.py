"""Code and commands in documents, and the served learner that they talk to."""

import contextlib
import re
import shlex
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from dosapp import Client

ROOT = Path(__file__).parents[2]


def blocks(text: str, language: str) -> list[str]:
    """The fenced blocks of a language."""
    return re.findall(rf"```{language}\n(.*?)```", text, flags=re.DOTALL)


def shell_commands(text: str) -> list[list[str]]:
    """The words of each command in `sh` blocks; blocks without a language are not for running."""
    joined = text.replace("\\\n", " ")  # commands of several lines
    lines = [line for block in blocks(joined, "sh") for line in block.splitlines()]
    return [words for line in lines if (words := shlex.split(line, comments=True))]


def all_blocks(text: str) -> list[tuple[str, str]]:
    """The language and the content of every fenced block, in order."""
    return re.findall(r"^```(\w*)\n(.*?)^```", text, flags=re.DOTALL | re.MULTILINE)


@contextlib.contextmanager
def serving(words: list[str], folder: Path) -> Iterator[str]:
    """`dosapp serve` as the page says, on a free port."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    command = [
        sys.executable,
        "-m",
        "dosapp",
        "serve",
        *(port if w == "8000" else w for w in words),
    ]
    with (
        subprocess.Popen(command, cwd=folder) as process,
        Client(f"http://127.0.0.1:{port}") as one,
    ):
        try:
            one.wait(240)
            yield one.url
        finally:
            process.terminate()
