"""Scenarios: tasks, test-set halves, sessions, and modifiers that return a new scenario."""

import dataclasses

import numpy as np
import pytest
import torch
from PIL import Image

from dosapp.data.base import Dataset, Split
from dosapp.data.images import InMemoryImages, UnlabelledImages
from dosapp.data.registry import SYNTHETIC
from dosapp.errors import InputError
from dosapp.experiments.plan import build_scenario
from dosapp.learner.learner import Learner
from dosapp.scenario import Session, concat_scenarios, split_dataset
from support.images import PREPROCESS


def first_classes(dataset, count):
    return dataclasses.replace(dataset, classes=dataset.classes[:count])


SHAPES = first_classes(SYNTHETIC["shapes"].draw_dataset(32, 6, 12), 12)
SIGNS = first_classes(SYNTHETIC["signs"].draw_dataset(32, 4, 4), 4)


@pytest.fixture
def scenario():
    return split_dataset(SHAPES, 4, seed=0)


def test_tasks_are_disjoint_and_in_order(scenario) -> None:
    assert scenario.classes == SHAPES.classes
    assert [len(task.classes) for task in scenario.tasks] == [3, 3, 3, 3]


def test_a_template_is_part_of_the_scenario(small) -> None:
    default, own = (
        build_scenario(small(template=t), PREPROCESS) for t in ("", "a drawing of a {}.")
    )
    assert own.hash != default.hash
    assert own.session(0).prompts[own.classes[0]].caption("star") == "a drawing of a star."
    assert own.tasks[0].prompts.evaluate == ("a drawing of a {}.",)
    for wrong in ("a photo", "a {} and a {}", "{0} {}"):
        with pytest.raises(InputError, match=r"write \{\} once, where the class name goes"):
            small(template=wrong)


def test_a_stream_of_one_class_is_as_long_as_before(scenario) -> None:
    one_class = scenario.one_class()
    for t in range(4):
        assert len(set(one_class.stream_labels(t))) == 1
        assert len(one_class.stream_labels(t)) == len(scenario.stream_labels(t))
    assert one_class.hash != scenario.hash


def test_halves_are_disjoint_per_class_and_cover_the_test_set(scenario) -> None:
    for task in scenario.tasks:
        unlabelled, test = set(task.unlabelled.keys()), set(task.test.keys())
        assert not unlabelled & test
        assert len(unlabelled | test) == 36
        assert np.bincount(task.test.labels).tolist() == [6, 6, 6]


def test_a_session_streams_all_seen_tasks_once(scenario) -> None:
    for t in range(4):
        keys = scenario.session(t).unlabelled.keys()
        expected = [key for task in scenario.tasks[: t + 1] for key in task.unlabelled.keys()]
        assert sorted(keys) == sorted(expected)
        assert len(keys) == len(set(keys))


def test_the_stream_type_has_no_labels(scenario) -> None:
    unlabelled = scenario.session(1).unlabelled
    assert type(unlabelled) is UnlabelledImages
    assert "labels" not in {f.name for f in dataclasses.fields(unlabelled)}
    assert not hasattr(unlabelled, "labels")


def test_stream_labels_are_in_the_order_of_the_stream(scenario) -> None:
    labels, session = scenario.stream_labels(2), scenario.session(2)
    by_key = {
        key: 3 * n + label
        for n, task in enumerate(scenario.tasks)
        for key, label in zip(task.unlabelled.keys(), task.unlabelled.labels, strict=True)
    }
    assert labels.tolist() == [by_key[key] for key in session.unlabelled.keys()]


def test_same_seed_same_hash_other_seed_other_hash(scenario) -> None:
    assert split_dataset(SHAPES, 4, seed=0).hash == scenario.hash
    assert split_dataset(SHAPES, 4, seed=1).hash != scenario.hash


def test_the_hash_depends_on_labels() -> None:
    pixels = InMemoryImages(torch.zeros(4, 3, 4, 4, dtype=torch.uint8))
    test = Split(pixels, np.array([0, 0, 1, 1]))
    first, second = (
        split_dataset(Dataset("pets", ("a", "b"), Split(pixels, np.array(labels)), test), 1)
        for labels in ([0, 0, 1, 1], [0, 1, 1, 1])
    )
    assert first.hash != second.hash


def test_no_repr_prints_pixels_or_files(scenario) -> None:
    assert repr(scenario) == "Scenario('shapes', 4 tasks, 12 classes)"
    assert repr(scenario.session(0).train).startswith("LabelledImages(")
    assert repr(scenario.session(0).unlabelled) == "UnlabelledImages(18 images)"
    for value in (SHAPES, scenario.tasks[0], scenario.session(0)):
        assert len(repr(value)) < 3000  # names of classes


def test_a_disjoint_stream_never_repeats_an_image(scenario) -> None:
    disjoint = scenario.disjoint()
    keys = [key for t in range(4) for key in disjoint.session(t).unlabelled.keys()]
    assert len(keys) == len(set(keys)) == 4 * 18
    assert any(
        key in set(scenario.tasks[0].unlabelled.keys())
        for key in disjoint.session(3).unlabelled.keys()
    )


def test_imbalance_follows_the_dirichlet_and_keeps_the_test_balanced() -> None:
    shares = []
    for seed in range(40):
        scenario = split_dataset(SHAPES, 4, seed=seed).imbalanced()
        for task in scenario.tasks:
            counts = np.bincount(task.unlabelled.labels, minlength=3)
            assert counts.max() <= 6
            shares.append(np.sort(counts)[0])
            assert np.bincount(task.test.labels).tolist() == [6, 6, 6]
    assert np.mean(np.array(shares) == 0) > 0.05  # at times a class is absent
    assert np.mean(shares) < 4  # far from the balanced 6


def test_fraction_noise_order_and_no_stream(scenario) -> None:
    assert [len(task.unlabelled) for task in scenario.fraction(0.5).tasks] == [9, 9, 9, 9]
    noisy = scenario.noisy(stream=0.1)
    clean, dirty = (s.session(0).unlabelled.read([0, 1]) for s in (scenario, noisy))
    assert 0.02 < (dirty - clean).std() < 0.11
    assert (dirty.min(), dirty.max()) >= (0, 0)
    assert dirty.max() <= 1
    assert torch.equal(dirty, noisy.session(0).unlabelled.read([0, 1]))
    assert torch.equal(noisy.tasks[0].test.read([0]), scenario.tasks[0].test.read([0]))
    blocks = scenario.correlated().stream_labels(3)
    assert (np.diff(blocks) != 0).sum() == 11
    assert len(scenario.without_stream().session(3).unlabelled) == 0
    full = scenario.full_test()
    assert len(full.tasks[0].test) == 36
    assert len(full.session(0).unlabelled) == 0


def test_the_full_test_is_complete_whatever_modifies_the_stream(small) -> None:
    whole = build_scenario(small(full_test=True), PREPROCESS)
    for changes in ({"stream_fraction": 0.25}, {"imbalanced": True}, {"stream_noise": 0.3}):
        changed = build_scenario(small(full_test=True, **changes), PREPROCESS)
        assert len(changed.tasks[0].test) == len(whole.tasks[0].test) == 24
        assert torch.equal(changed.tasks[0].test.read([20]), whole.tasks[0].test.read([20]))


def test_concat_is_one_growing_class_space(scenario) -> None:
    long = concat_scenarios(scenario, split_dataset(SIGNS, 2, seed=0))
    assert len(long.tasks) == 6
    assert len(long.session(5).unlabelled) == 4 * 18 + 2 * 4
    assert long.stream_labels(5).max() == 15
    assert long.session(5).unlabelled.read(range(20)).shape == (20, 3, 32, 32)
    assert len(long.controls) == 2
    assert long.boundaries == (4,)
    with pytest.raises(InputError, match="two of the scenarios"):
        concat_scenarios(scenario, scenario)
    with pytest.raises(InputError, match="different seeds or modifiers"):
        concat_scenarios(scenario, split_dataset(SIGNS, 2, seed=1))


def test_joint_is_the_same_tasks_in_one_session(scenario) -> None:
    joint = scenario.joint()
    assert len(joint.task_groups) == 1
    assert joint.session(0).classes == scenario.classes
    assert len(joint.session(0).train) == 72


def test_no_stream_after_the_first_session(scenario) -> None:
    late = scenario.without_first_stream()
    assert len(late.stream_labels(0)) == len(late.session(0).unlabelled) == 0
    for t in range(1, 4):
        assert np.array_equal(late.stream_labels(t), scenario.stream_labels(t))
    assert late.hash != scenario.hash


def test_settings_choose_the_order_of_the_stream(small) -> None:
    settings = {"test_images": 24, "stream_batch_size": 4}
    few = build_scenario(small(classes_per_batch="1-2", **settings), PREPROCESS)
    labels = few.stream_labels(1)
    assert max(len(set(labels[i : i + 4])) for i in range(0, len(labels) - 4, 4)) <= 2
    slots = build_scenario(small(stream_dirichlet=0.1, **settings), PREPROCESS)
    assert len({s.hash for s in (few, slots, build_scenario(small(**settings), PREPROCESS))}) == 3


class TestClassOrderSeed:
    def test_it_permutes_the_classes_as_pycil_does(self, small) -> None:
        plain = build_scenario(small(), PREPROCESS).classes
        shuffled = build_scenario(small(class_order_seed=1993), PREPROCESS).classes
        benchmark = SYNTHETIC["shapes"].benchmark_names
        drawn = [benchmark[n] for n in np.random.RandomState(1993).permutation(len(plain))]
        assert list(shuffled) == drawn

    def test_images_of_a_class_stay_the_same(self, small) -> None:
        """The halves of a class depend on its name, so orders can be compared."""

        def test_images(settings):
            tasks = build_scenario(settings, PREPROCESS).tasks
            return {key for task in tasks for key in task.test.keys()}

        assert test_images(small()) == test_images(small(class_order_seed=7))

    def test_two_orders_are_refused(self, small, tmp_path) -> None:
        with pytest.raises(InputError, match="are two orders of the classes; give one"):
            small(class_order=tmp_path / "order.txt", class_order_seed=1993)

    def test_the_papers_order_is_of_the_papers_datasets(self, small) -> None:
        with pytest.raises(InputError, match="class_order is 'paper', which shapes does not have"):
            build_scenario(small(class_order="paper"), PREPROCESS)


def test_two_orders_of_the_stream_are_refused(small) -> None:
    with pytest.raises(InputError, match="correlated and stream_dirichlet are two orders"):
        small(correlated=True, stream_dirichlet=0.1)


def test_tasks_by_order_and_by_list() -> None:
    backwards = tuple(reversed(SHAPES.classes))
    assert split_dataset(SHAPES, 3, order=backwards).classes == backwards
    groups = [[SHAPES.classes[5]], [SHAPES.classes[0], SHAPES.classes[3]]]
    assert [list(task.classes) for task in split_dataset(SHAPES, groups).tasks] == groups


def test_prints_as_a_short_table(scenario) -> None:
    lines = str(scenario).splitlines()
    assert len(lines) == 6
    assert scenario.hash in lines[0]


def test_batches_start_anywhere(scenario) -> None:
    unlabelled = scenario.session(0).unlabelled
    whole = list(unlabelled.batches(5))
    assert [len(x) for x in whole] == [5, 5, 5, 3]
    assert torch.equal(next(unlabelled.batches(5, start=2)), whole[2])


class TestBadScenarios:
    def test_more_tasks_than_classes(self) -> None:
        with pytest.raises(
            InputError, match="tasks is 20, but shapes has 12 classes; give between 1"
        ):
            split_dataset(SHAPES, 20)
        alone = dataclasses.replace(SHAPES, classes=SHAPES.classes[:1])
        with pytest.raises(InputError, match="has 1 class; give"):
            split_dataset(alone, 2)

    def test_a_class_too_small_to_halve(self) -> None:
        pixels = InMemoryImages(torch.zeros(3, 3, 4, 4, dtype=torch.uint8))
        train, test = Split(pixels, np.array([0, 0, 1])), Split(pixels, np.array([0, 0, 1]))
        with pytest.raises(InputError, match="class 'b' of pets has 1 test image"):
            split_dataset(Dataset("pets", ("a", "b"), train, test), 1)

    def test_an_order_with_an_unknown_or_a_repeated_class(self) -> None:
        with pytest.raises(InputError, match="'cat', which shapes does not have"):
            split_dataset(SHAPES, 2, order=["cat"])
        with pytest.raises(InputError, match="twice"):
            split_dataset(SHAPES, 1, order=[SHAPES.classes[0]] * 2)

    def test_an_empty_task(self) -> None:
        with pytest.raises(InputError, match="empty task"):
            split_dataset(SHAPES, [[SHAPES.classes[0]], []])

    def test_fraction_outside(self) -> None:
        with pytest.raises(InputError, match=r"fraction of D\^u is 1.5"):
            split_dataset(SHAPES, 2).fraction(1.5)


class TestBadSessions:
    image = torch.zeros(1, 3, 4, 4, dtype=torch.uint8)

    def test_not_a_tensor_of_bytes(self) -> None:
        for wrong in (self.image.float(), self.image[0], self.image.numpy(), None):
            with pytest.raises(InputError, match="give a uint8 tensor"):
                Session.from_images({"cat": wrong})

    def test_different_sizes(self) -> None:
        with pytest.raises(InputError, match="different sizes"):
            Session.from_images({"cat": self.image, "dog": self.image[..., :2]})

    def test_no_classes_or_names(self) -> None:
        with pytest.raises(InputError, match="no classes"):
            Session.from_images({})
        with pytest.raises(InputError, match="empty class name"):
            Session.from_images({" ": self.image})

    def test_a_class_without_images(self) -> None:
        with pytest.raises(InputError, match="class 'wolf' has no images; give at least one"):
            Session.from_images({"wolf": self.image[:0], "fox": self.image})

    def test_a_learner_does_not_add_a_class_without_images(self, small, tiny) -> None:
        learner = Learner(small().learner(), tiny)
        before = learner.digest()
        with pytest.raises(InputError, match="class 'wolf' has no images; give at least one"):
            learner.learn({"wolf": [], "fox": [Image.new("RGB", (40, 50))]})
        assert learner.classes == []
        assert learner.digest() == before
