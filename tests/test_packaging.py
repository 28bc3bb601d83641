"""What is installed: the wheel, the environment of the demo, and messages about missing extras."""

import os
import re
import subprocess
import sys
import sysconfig
import tarfile
import tomllib
import zipfile
from importlib.metadata import requires
from pathlib import Path

import pytest
from PIL import Image

from dosapp.runtime.extras import PACKAGES
from support.cli import FLAGS, dosapp

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def test_importing_the_package_imports_nothing_heavy() -> None:
    """It takes a tenth of a second; torch, transformers and pydantic would take several."""
    program = (
        "import sys, dosapp; dir(dosapp)\n"
        "print(sorted({name.partition('.')[0] for name in sys.modules}))"
    )
    run = subprocess.run(
        [sys.executable, "-c", program], check=True, capture_output=True, text=True
    )
    for package in ("torch", "transformers", "pydantic", "numpy", "typer", "PIL"):
        assert f"'{package}'" not in run.stdout


def test_the_demo_installs_only_what_it_needs() -> None:
    makefile = (ROOT / "Makefile").read_text()
    first, second = re.findall(r"\$\(INSTALL\) -e '\.\[(.*?)\]'", makefile)
    # Reports, `dosapp serve --demo`, and `dosapp data inspect`: the first pages use them.
    assert set(first.split(",")) == {"report", "serve", "inspect"}
    assert set(first.split(",")) < set(second.split(","))
    assert re.search(r"^demo: \$\(READY_TO_USE\)$", makefile, flags=re.MULTILINE)
    install = re.search(r"^INSTALL := (.*)$", makefile, flags=re.MULTILINE)[1]
    assert "--quiet" not in install  # pip's progress is the first thing a new user sees
    heavy = {"ray", "playwright", "schemathesis", "wandb", "datasets", "onnx", "mkdocs-material"}
    needed = {re.split(r"[\[>=<]", line)[0] for line in PROJECT["dependencies"]}
    for extra in first.split(","):
        needed |= {
            re.split(r"[\[>=<]", line)[0] for line in PROJECT["optional-dependencies"][extra]
        }
    assert not needed & heavy


def test_packages_that_are_checked_are_those_of_the_extras() -> None:
    for extra, modules in PACKAGES.items():
        packages = [
            re.split(r"[\[>=<]", line)[0] for line in PROJECT["optional-dependencies"][extra]
        ]
        for module in modules:
            assert module.replace("_", "-") in packages


@pytest.mark.parametrize(
    ("command", "missing", "extra"),
    [
        (["demo"], "matplotlib", "report"),
        (["report", "runs"], "jinja2", "report"),
        (["study", "study.yaml"], "scipy", "report"),
        (["bench", "--out", "bench"], "matplotlib", "report"),
        (["serve", "--demo"], "uvicorn", "serve"),
        (["serve", "--demo", "--replicas", "2"], "ray", "ray"),
        (["export", "my-learner", "out", "--kind", "onnx"], "onnxscript", "onnx"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_a_missing_extra_is_named_before_anything_is_computed(
    command, missing, extra, tmp_path, monkeypatch
) -> None:
    monkeypatch.setitem(sys.modules, missing, None)
    printed = dosapp(*command, cwd=tmp_path, code=2)
    assert f"needs {missing}; in a clone: pip install -e '.[{extra}]'" in printed.stderr
    assert printed.stdout == ""
    assert not list(tmp_path.iterdir())


def build(kind: str, folder: Path) -> Path:
    """Build with the packages of this environment; nothing is downloaded."""
    command = [sys.executable, "-m", "build", "--no-isolation", f"--{kind}", "--outdir", folder]
    subprocess.run([*command, ROOT], check=True, capture_output=True)
    (file,) = folder.iterdir()
    return file


@pytest.mark.slow
def test_the_wheel_runs_in_an_empty_environment(tmp_path) -> None:
    """With spaces and Unicode in every path, a home that cannot be written, and no clone."""
    wheel = build("wheel", tmp_path / "dist")
    assets = {
        path.relative_to(ROOT / "src").as_posix()
        for path in (ROOT / "src").rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert assets <= set(zipfile.ZipFile(wheel).namelist())

    folder = tmp_path / "füchse und 狐"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder / "venv"], check=True)
    bin_folder = folder / "venv" / ("Scripts" if os.name == "nt" else "bin")
    # The dependencies are those of this environment, its dosapp is not: .pth files are not read in
    # a folder that a .pth file adds.
    site = next((folder / "venv").rglob("site-packages"))
    (site / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    install = [sys.executable, "-m", "pip", "--python", bin_folder / "python", "install"]
    subprocess.run(
        [*install, "--no-deps", "--no-index", "--ignore-installed", wheel],
        check=True,
        capture_output=True,
    )
    home = folder / "home"
    home.write_text("not a folder, so that not even root can write below it")
    keep = ("PATH", "OMP_NUM_THREADS", "LANG", "LC_ALL")
    environment = {name: os.environ[name] for name in keep if name in os.environ}
    environment |= {"HOME": str(home), "COLUMNS": "200"}

    def run(*words: str) -> subprocess.CompletedProcess[str]:
        command = [bin_folder / words[0], *words[1:]]
        done = subprocess.run(
            command, cwd=folder, env=environment, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr
        return done

    where = run("python", "-c", "import dosapp; print(dosapp.__file__)")
    assert Path(where.stdout.strip()).is_relative_to(folder)
    for name in ("红色", "blå"):
        for shade in range(6):
            file = folder / "my images" / name / f"{shade}.png"
            file.parent.mkdir(parents=True, exist_ok=True)
            Image.new("RGB", (8, 8), (40 * shade, 0, len(name))).save(file)
    data = ["--data", "my images", "--tasks", "1", "--method", "zero-shot"]
    assert "set DOSAPP_CACHE" in run("dosapp", "run", *data).stderr
    run("dosapp", "run", "--method", "dosapp", *FLAGS, "--out", "läufe/ein lauf")
    run("dosapp", "report", "läufe", "--out", "bericht 1")
    assert (folder / "bericht 1" / "report.html").exists()


@pytest.mark.slow
def test_the_sdist_builds_the_same_package(tmp_path) -> None:
    with tarfile.open(build("sdist", tmp_path)) as archive:
        inside = {name.partition("/")[2] for name in archive.getnames()}
    assert {"pyproject.toml", "README.md", "LICENSE", "Makefile", "constraints.txt"} <= inside
    assert "src/dosapp/backbones/tiny/model.safetensors" in inside
    assert "tests/test_packaging.py" in inside


def test_every_extra_is_described_by_the_installed_package() -> None:
    declared = "\n".join(requires("dosapp") or [])
    for extra in ("report", "serve", "hub", "ray", "onnx"):
        assert re.search(rf"extra == ['\"]{extra}['\"]", declared), extra
