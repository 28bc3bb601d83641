"""The classifier of a CLIP model: class names, their prompts, and cached text features."""

import weakref
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from torch.nn.functional import normalize

from dosapp.backbones.base import Expert
from dosapp.data.base import Prompts


class TextHead:
    """The classes a student knows; a class is predicted by the features of its captions.

    Prompts are the templates of a class. A caption is a template with the class name in it.
    """

    def __init__(self) -> None:
        self.classes: list[str] = []  # a label is an index of this list
        self.prompts: dict[str, Prompts] = {}
        self._cache: weakref.WeakKeyDictionary[Expert, tuple[object, Tensor]] = (
            weakref.WeakKeyDictionary()
        )

    def add_classes(self, names: Sequence[str], prompts: Prompts) -> None:
        """Add the classes that are new, and set the prompts of all of them."""
        for name in names:
            if name not in self.prompts:
                self.classes.append(name)
            self.prompts[name] = prompts

    def clear(self) -> None:
        """Remove all classes."""
        self.classes, self.prompts = [], {}

    def rename_class(self, old: str, new: str) -> None:
        """Keep the index of a class, under another name."""
        self.classes[self.classes.index(old)] = new
        self.prompts[new] = self.prompts.pop(old)

    def remove_class(self, name: str) -> None:
        """Remove a class; the indices of the classes after it decrease by one."""
        self.classes.remove(name)
        del self.prompts[name]

    def captions(self, labels: Sequence[int] | None = None) -> list[str]:
        """Training captions of these classes, or of all."""
        names = self.classes if labels is None else [self.classes[label] for label in labels]
        return [self.prompts[name].caption(name) for name in names]

    @torch.no_grad()
    def class_embeddings(
        self, expert: Expert, prompts: Mapping[str, Prompts] | None = None
    ) -> Tensor:
        """Features for prediction: the normalised mean over evaluation templates.

        They are cached until a weight of the expert changes.

        Args:
            expert: The model that encodes the captions.
            prompts: Class names and their prompts; the known classes if not given.

        Returns:
            Unit features `[C, D]`.
        """
        prompts = prompts or {name: self.prompts[name] for name in self.classes}
        key = (expert.revision, tuple(prompts.items()))
        cached = self._cache.get(expert)
        if cached is None or cached[0] != key:
            embeddings: dict[str, Tensor] = {}
            # Captions of one template are encoded together, because they share their beginning.
            for prompt in dict.fromkeys(prompts.values()):
                names = [name for name in prompts if prompts[name] == prompt]
                encoded = [
                    expert.encode_text([template.format(name) for name in names])
                    for template in prompt.evaluate
                ]
                means = normalize(torch.stack(encoded).mean(dim=0), dim=-1)
                embeddings |= zip(names, means, strict=True)
            cached = (key, torch.stack([embeddings[name] for name in prompts]))
            self._cache[expert] = cached
        return cached[1]
