"""Corrections: images with their true class that wait for the next session."""

import difflib
import hashlib
import threading
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from dosapp.errors import BusyError, InputError


@dataclass
class Corrections:
    """Images and their classes, one class per image: the last correction of an image counts.

    Example:
        >>> import torch
        >>> waiting, image = Corrections(), torch.zeros(3, 32, 32, dtype=torch.uint8)
        >>> waiting.add(image, "wolf", ["fox", "wolf"]), waiting.add(image, "fox", ["fox", "wolf"])
        (1, 1)
        >>> list(waiting.by_class())
        ['fox']
    """

    limit: int = 1024
    _items: dict[str, tuple[str, Tensor]] = field(default_factory=dict)  # by the image's digest
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def __len__(self) -> int:
        return len(self._items)

    def add(self, image: Tensor, name: str, known: Collection[str] | None) -> int:
        """Add a correction, and return how many wait.

        Args:
            image: `uint8 [3, H, W]`.
            name: Its class.
            known: Classes that need no confirmation; None confirms any.

        Raises:
            InputError: The class is neither known nor among the corrections that wait.
            BusyError: Too many wait.
        """
        key = hashlib.sha256(image.contiguous().numpy().tobytes()).hexdigest()
        with self._lock:
            if known is not None and name not in {*known, *(c for c, _ in self._items.values())}:
                closest = difflib.get_close_matches(name, list(known), n=1)
                hint = f"did you mean '{closest[0]}'? Otherwise " if closest else ""
                raise InputError(
                    f"there is no class '{name}'; {hint}confirm a new class with new_class=true "
                    "(on the command line --new-class)"
                )
            if len(self._items) >= self.limit and key not in self._items:
                raise BusyError(f"{self.limit} corrections wait already; start a session with them")
            self._items[key] = (name, image)
            return len(self._items)

    def by_class(self) -> dict[str, Tensor]:
        """The images `uint8 [n, 3, H, W]` of each class."""
        images: dict[str, list[Tensor]] = {}
        for name, image in self._items.values():
            images.setdefault(name, []).append(image)
        return {name: torch.stack(found) for name, found in images.items()}

    def take(self) -> "Corrections":
        """Remove all that wait, and return them."""
        with self._lock:
            taken, self._items = self._items, {}
        return Corrections(self.limit, taken)

    def give_back(self, taken: "Corrections") -> None:
        """Keep what was taken, where no later correction of the same image came."""
        with self._lock:
            self._items = {**taken._items, **self._items}

    def rename(self, old: str, new: str | None) -> None:
        """Follow a renamed class; drop those of a removed one (None), which they would add."""
        self._relabel({old: new})

    def drop_unknown(self, known: Collection[str]) -> str:
        """Drop corrections of other classes; return a note on dropped and kept ones, or ""."""
        before = len(self)
        names = {name for name, _ in self._items.values()}
        self._relabel(dict.fromkeys(names - set(known)))
        dropped, kept = before - len(self), len(self)
        notes = [f"{dropped} of classes that this version does not know were dropped"] * (
            dropped > 0
        ) + [f"{kept} wait for the next session"] * (kept > 0)
        return f"corrections: {', '.join(notes)}" if notes else ""

    def _relabel(self, names: Mapping[str, str | None]) -> None:
        with self._lock:
            moved = {k: (names.get(c, c), image) for k, (c, image) in self._items.items()}
            self._items = {k: (c, image) for k, (c, image) in moved.items() if c is not None}
