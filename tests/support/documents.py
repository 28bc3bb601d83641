"""Code and commands in documents."""

import re
import shlex
from pathlib import Path

ROOT = Path(__file__).parents[2]


def blocks(text: str, language: str) -> list[str]:
    """The fenced blocks of a language."""
    return re.findall(rf"```{language}\n(.*?)```", text, flags=re.DOTALL)


def shell_commands(text: str) -> list[list[str]]:
    """The words of each command in `sh` blocks; blocks without a language are not for running."""
    lines = [line for block in blocks(text, "sh") for line in block.splitlines()]
    return [words for line in lines if (words := shlex.split(line, comments=True))]
