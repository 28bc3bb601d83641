"""What a learner does with a session before it trains: build it, check it, number its classes."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dosapp.data.base import Prompts
from dosapp.data.convert import as_dataset
from dosapp.data.inputs import Images, stack_images
from dosapp.data.preprocess import Preprocess
from dosapp.errors import InputError
from dosapp.scenario import Session
from dosapp.student.text_head import TextHead


def build_session(
    images: Mapping[str, Images] | Any,
    preprocess: Preprocess,
    known: Mapping[str, Prompts],
    template: str | None,
) -> Session:
    """Build a session from labelled images of any form.

    Args:
        images: Images by class name, or whatever `as_dataset` takes.
        preprocess: Resize and crop of the backbone.
        known: Prompts of the classes that the learner knows; they keep them.
        template: Of the captions of new classes; those of the data if not given.

    Returns:
        The session.
    """
    if isinstance(images, Mapping) and all(isinstance(name, str) for name in images):
        stacked = {name: stack_images(found, preprocess) for name, found in images.items()}
        session = Session.from_images(stacked)
    else:
        session = Session.from_dataset(as_dataset(images, preprocess, hold_out=False))
    prompts = {
        name: known.get(name) or (Prompts.from_template(template) if template else given)
        for name, given in session.prompts.items()
    }
    return replace(session, prompts=prompts)


def register_classes(session: Session, text_head: TextHead, image_size: int) -> Tensor:
    """Add the classes of a session to those of a student.

    Args:
        session: The session.
        text_head: The classes of the student.
        image_size: Of the backbone.

    Returns:
        The labels `[N]` of the session's images as indices of all classes.

    Raises:
        InputError: There are no images, or they have another size.
    """
    if not len(session.train):
        raise InputError("the session has no training images; give at least one per class")
    shape, size = tuple(session.train.read([0]).shape[1:]), image_size
    if shape != (3, size, size):
        raise InputError(f"training images have shape {list(shape)}; give [3, {size}, {size}]")
    for name in session.classes:
        text_head.add_classes([name], session.prompts[name])
    index = {name: n for n, name in enumerate(text_head.classes)}
    indices = np.array([index[name] for name in session.classes], dtype=np.int64)
    return torch.from_numpy(indices[session.train.labels])


def describe_only_class(name: str) -> str:
    """Say why a learner's only class cannot be trained, and what would work."""
    return (
        f"'{name}' would be the learner's only class, so there is no other class to distinguish it "
        "from and nothing useful is learned; put at least two classes in the first session"
    )


def list_session_warnings(
    session: Session, batch_size: int | None, is_only_class: bool
) -> list[str]:
    """Say what may be wrong with a session that can be trained all the same.

    Args:
        session: The session.
        batch_size: The one that the user gave, if any.
        is_only_class: Whether the learner knows no class but the one of the session, and needs two.

    Returns:
        One sentence per problem.
    """
    messages, size = [], len(session.train)
    if is_only_class:
        messages.append(describe_only_class(session.classes[0]))
    if batch_size is not None and size < batch_size:
        messages.append(
            f"the session has {size} training images, fewer than a batch of "
            f"{batch_size}; they are trained as one smaller batch"
        )
    return messages


def list_similar_names(names: Sequence[str], known: Sequence[str]) -> list[str]:
    """Say which class names differ by case, spaces or underscores only.

    Args:
        names: Of a session.
        known: Of the learner.

    Returns:
        One sentence per pair.

    Example:
        >>> list_similar_names(["Fox", "wolf"], ["fox"])
        ["'Fox' and 'fox' are two classes, though only case or spaces differ; rename one"]
    """
    first: dict[str, str] = {}
    messages = []
    for name in dict.fromkeys([*known, *names]):
        other = first.setdefault("".join(name.replace("_", " ").casefold().split()), name)
        if other != name and name in names:
            messages.append(
                f"'{name}' and '{other}' are two classes, though only case or spaces differ; "
                "rename one"
            )
    return messages
