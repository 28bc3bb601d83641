"""Learners on the Hugging Face Hub: safetensors, JSON and a model card, nothing else."""

import shutil
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from dosapp.errors import DosappError, InputError
from dosapp.learner.learner_folder import LearnerDescription
from dosapp.learner.model_card import is_public, write_model_card
from dosapp.runtime.files import ensure_dir

if TYPE_CHECKING:
    from dosapp.learner.learner import Learner

FILES = ("learner.json", "versions/*.safetensors", "working.safetensors")


def push_folder(
    folder: Path,
    repo_id: str,
    *,
    private: bool = True,
    include_images: bool = False,
    token: str | None = None,
) -> str:
    """Upload a learner's folder, with a model card written from its history.

    Only the learner's own files are sent: no tokens, logs or uploads of a service.

    Args:
        folder: A learner's folder.
        repo_id: `ORG/NAME`.
        private: Of a new repository.
        include_images: Allow it although images are sent.
        token: Of the hub.

    Returns:
        The address of the commit.

    Raises:
        InputError: The folder holds no learner, the name is wrong, or images would be sent.
        DosappError: The hub refuses it or cannot be reached.
    """
    from huggingface_hub import CommitOperationAdd, HfApi

    description = LearnerDescription.read(folder)
    if description.stores_images and not include_images:
        raise InputError(
            f"'{folder}' holds images (a replay buffer, a canary or a method that stores them); "
            "add --include-images to upload them too"
        )
    backbone = description.settings["backbone"]
    if not is_public(backbone):
        warnings.warn(
            f"the backbone '{backbone}' is a folder here and is not uploaded; others need a copy "
            f"of it: Learner.from_pretrained('{repo_id}', backbone=…)",
            stacklevel=2,
        )
    paths = sorted(path for pattern in FILES for path in folder.glob(pattern))
    card = write_model_card(folder, repo_id)
    operations = [CommitOperationAdd("README.md", card.encode())]
    operations += [CommitOperationAdd(str(p.relative_to(folder)), str(p)) for p in paths]
    with _hub_errors(f"learner '{repo_id}' cannot be uploaded"):
        api = HfApi(token=token, library_name="dosapp")
        api.create_repo(repo_id, private=private, exist_ok=True)
        message = f"Upload {len(paths)} files of a dosapp learner"
        commit = api.create_commit(repo_id, operations, commit_message=message)
    return str(commit.commit_url)


def pull_folder(
    repo_id: str, target: Path, *, revision: str | None = None, token: str | None = None
) -> None:
    """Download a learner, through the hub's cache.

    Args:
        repo_id: `ORG/NAME`.
        target: A new folder; it appears when it is complete.
        revision: A branch, tag or commit.
        token: Of the hub, for private repositories.

    Raises:
        InputError: The target exists, or the repository holds no learner.
        DosappError: The hub cannot be reached or does not know it.
    """
    from huggingface_hub import snapshot_download

    if target.exists():
        raise InputError(f"'{target}' already exists; choose another folder")
    with _hub_errors(f"learner '{repo_id}' cannot be downloaded"):
        cached = snapshot_download(
            repo_id,
            revision=revision,
            token=token,
            allow_patterns=[*FILES, "README.md"],
            library_name="dosapp",
        )
    with tempfile.TemporaryDirectory(dir=ensure_dir(target.parent)) as scratch:
        copy = Path(scratch) / "learner"
        shutil.copytree(cached, copy)  # the cache holds links, which a learner's folder may not
        LearnerDescription.read(copy)  # raises if it is something else
        shutil.move(copy, target)


@contextmanager
def pull_temporarily(repo_id: str, *, revision: str | None, token: str | None) -> Iterator[Path]:
    """Download a learner to a folder that is deleted at the end."""
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / "learner"
        pull_folder(repo_id, folder, revision=revision, token=token)
        yield folder


def push_learner(learner: "Learner", repo_id: str, **options: object) -> str:
    """Save a learner to a temporary folder and upload it."""
    with tempfile.TemporaryDirectory() as scratch:
        learner.save(scratch)
        return push_folder(Path(scratch), repo_id, **options)  # type: ignore[arg-type]


@contextmanager
def _hub_errors(message: str) -> Iterator[None]:
    """Turn what the hub's client raises into one sentence."""
    from huggingface_hub.errors import (
        HFValidationError,
        LocalEntryNotFoundError,
        OfflineModeIsEnabled,
        RepositoryNotFoundError,
    )

    try:
        yield
    except (HFValidationError, RepositoryNotFoundError) as error:
        raise InputError(f"{message}: {_first_line(error)}") from error
    except (OSError, OfflineModeIsEnabled, LocalEntryNotFoundError) as error:
        raise DosappError(f"{message}: {_first_line(error)}") from error
    except Exception as error:  # its HTTP client has errors of its own
        if type(error).__module__.partition(".")[0] not in ("httpx", "httpx2", "huggingface_hub"):
            raise
        raise DosappError(f"{message}: {_first_line(error)}") from error


def _first_line(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return (lines[0] if lines else type(error).__name__)[:200]
