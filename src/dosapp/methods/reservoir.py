"""A few pictures of a stream, as balanced over predicted classes as they can be (NOTE's PBRS)."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor


@dataclass
class Reservoir:
    capacity: int
    images: list[Tensor] = field(default_factory=list)  # [3, H, W] each
    labels: list[int] = field(default_factory=list)
    seen: Counter[int] = field(default_factory=Counter)  # of each class, ever

    @property
    def offered(self) -> int:
        return self.seen.total()

    def offer(self, picture: Tensor, label: int, generator: torch.Generator) -> None:
        """While there is room, keep it. Then, a class that is not among the largest takes the place
        of a random picture of one of those; one that is replaces its own with chance m_c / n_c."""
        self.seen[label] += 1
        if len(self.labels) < self.capacity:
            self.images.append(picture.clone())
            self.labels.append(label)
            return
        held = Counter(self.labels)
        largest = {c for c, n in held.items() if n == max(held.values())}
        if label in largest:
            if torch.rand((), generator=generator) > held[label] / self.seen[label]:
                return
            largest = {label}
        places = [n for n, c in enumerate(self.labels) if c in largest]
        place = places[int(torch.randint(len(places), (), generator=generator))]
        self.images[place], self.labels[place] = picture.clone(), label

    def state(self) -> dict[str, Tensor]:
        if not self.labels:
            return {}
        return {
            "pictures": torch.stack(self.images),
            "labels": torch.tensor(self.labels),
            "seen": torch.tensor(sorted(self.seen.items())),
        }

    def load(self, state: Mapping[str, Tensor]) -> None:
        if "labels" in state:
            self.images, self.labels = list(state["pictures"]), state["labels"].tolist()
            self.seen = Counter({int(c): int(n) for c, n in state["seen"]})
