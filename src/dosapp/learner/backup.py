"""Copy a learner's folder, also while it is served: the copy is one state that was acknowledged."""

from pathlib import Path

from dosapp.errors import CorruptRecordError, InputError
from dosapp.history.history import History
from dosapp.learner.learner_folder import LearnerDescription
from dosapp.learner.verify import find_problems, read_while_still
from dosapp.runtime.files import is_private, list_names, read_bytes, write_bytes
from dosapp.runtime.new_folder import new_folder


def copy_learner(source: Path, target: Path) -> int:
    """Copy a learner with its versions, checkpoint, tokens and audit log.

    The writer need not stop: versions do not change once they are acknowledged, and the checkpoint
    is replaced as a whole. If old versions are merged meanwhile, the copy begins again.

    Args:
        source: The folder of a learner, or a backup.
        target: A folder that is empty or does not exist; it appears when the copy is complete.

    Returns:
        The version at the head of the copy.

    Raises:
        InputError: There is no learner, or the target is not empty.
        CorruptRecordError: The source is damaged; nothing was written.
    """
    LearnerDescription.read(source)
    if source.resolve() in target.resolve().parents:
        raise InputError(f"'{target}' is inside '{source}'; choose a folder elsewhere")

    def attempt() -> list[str]:
        try:
            with new_folder(target) as folder:
                _copy_files(source, folder)
                problems = find_problems(folder)
                if problems:
                    raise CorruptRecordError(problems[0].replace(str(folder), str(source)))
        except CorruptRecordError as error:
            return [str(error)]
        return []

    problems = read_while_still(source, attempt, lambda found: not found)
    if problems:
        raise CorruptRecordError(
            f"{problems[0]}; nothing was written (see: dosapp verify {source})"
        )
    return History(target, lambda key: None).head


def _copy_files(source: Path, target: Path) -> None:
    """Copy the checkpoint, the versions it rests on, then all else that is not hidden."""
    _copy_file(source, target, "working.safetensors")
    head = History(target, lambda key: None).head
    for number in History(source, lambda key: None).numbers_up_to(head):
        _copy_file(source, target, f"versions/{number:06d}.safetensors")
    for name in list_names(source):
        path = source / name
        if not name.startswith(".") and path.is_file() and name != "working.safetensors":
            _copy_file(source, target, name)


def _copy_file(source: Path, target: Path, name: str) -> None:
    try:
        data = read_bytes(source / name)
        write_bytes(target / name, data, private=is_private(source / name))
    except FileNotFoundError as error:
        raise CorruptRecordError(f"'{source / name}' does not exist") from error
