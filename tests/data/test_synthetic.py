"""Generated domains."""

import pytest
import torch

from dosapp.data.registry import SYNTHETIC

SIZE = 32


@pytest.mark.parametrize("domain", SYNTHETIC.values(), ids=lambda d: d.name)
class TestDomains:
    def test_parts_are_disjoint(self, domain) -> None:
        parts = [domain.pretraining_names, domain.benchmark_names, domain.control_names]
        names = [name for part in parts for name in part]
        assert len(names) == len(set(names))
        assert [len(p) for p in parts] == [domain.pretraining, domain.benchmark, domain.control]

    def test_every_word_of_the_benchmark_is_pretrained(self, domain) -> None:
        words = {word for name in domain.pretraining_names for word in name.split()}
        assert {word for name in domain.benchmark_names for word in name.split()} <= words

    def test_images_are_the_same_every_time(self, domain) -> None:
        first, second = (domain.draw_dataset(SIZE, 1, 2) for _ in range(2))
        assert torch.equal(first.test.images.read([0, 5]), second.test.images.read([0, 5]))
        assert first.train.images.key(3) == second.train.images.key(3)
        assert not torch.equal(first.train.images.read([0]), first.test.images.read([0]))


@pytest.mark.parametrize(
    ("name", "key"), [("shapes", "shapes-32px-fb000134"), ("signs", "signs-32px-03a47f1b")]
)
def test_pixels_are_those_of_version_0_1(name, key) -> None:
    """The key has a hash of all pixels, and is part of the keys of stored results."""
    train = SYNTHETIC[name].draw_dataset(SIZE, 3, 2).train
    assert train.images.key(0) == f"{key}/train/0"
