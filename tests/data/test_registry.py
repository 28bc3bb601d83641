"""Datasets by name, and what loading one imports."""

import subprocess
import sys
from pathlib import Path

import pytest

from dosapp.data.base import check_class_names
from dosapp.data.registry import load_dataset
from dosapp.errors import InputError
from support.images import PREPROCESS, write_class_folders


def test_unknown_dataset_suggests_the_nearest() -> None:
    with pytest.raises(InputError, match="did you mean 'shapes'"):
        load_dataset("shaps", PREPROCESS)


def test_class_names() -> None:
    with pytest.raises(InputError, match="'cat' twice"):
        check_class_names(["cat", "dog", "cat"], "pets")
    with pytest.raises(InputError, match="empty class name"):
        check_class_names(["cat", " "], "pets")


def test_loading_needs_no_backbone(tmp_path: Path) -> None:
    """Only a `Preprocess` value: transformers is never imported."""
    write_class_folders(tmp_path, ["cat", "dog"])
    program = f"""
import sys
from dosapp.data.preprocess import Preprocess
from dosapp.data.registry import load_dataset

dataset = load_dataset({str(tmp_path)!r}, Preprocess(32, {{"shortest_edge": 32}}, 3))
print(list(dataset.test.images.read([0, 3]).shape), "transformers" in sys.modules)
"""
    command = [sys.executable, "-c", program]
    result = subprocess.run(command, capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[2, 3, 32, 32] False"
