"""The one place where weights change."""

import gc
import weakref

import pytest
import torch

from dosapp.bench.model import random_clip, small
from dosapp.data.base import Prompts
from dosapp.errors import InputError
from dosapp.functional.ema import momentum_tensor
from dosapp.functional.losses import clip_loss
from dosapp.functional.masks import top_fraction
from dosapp.functional.pseudo_labels import max_logit_labels
from dosapp.methods.dosapp import DoSAPP
from dosapp.student.selection import Selection
from dosapp.student.student import Student

NAMES = ["red plain circle", "blue striped square", "green dotted star"]


@pytest.fixture
def student(tiny):
    student = Student(tiny, lr=1e-2, weight_decay=0.2)
    student.text_head.add_classes(NAMES, Prompts())
    return student


def batch(count: int = 6):
    generator = torch.Generator().manual_seed(count)
    pixels = torch.rand(count, 3, 32, 32, generator=generator)
    return pixels, torch.arange(count) % len(NAMES)


def masked(student, share: float = 0.1) -> Selection:
    weights = student.backbone.first_mlp_weights()
    generator = torch.Generator().manual_seed(0)
    mask = {n: torch.rand(w.shape, generator=generator) < share for n, w in weights.items()}
    return Selection(tuple(weights), mask)


def copy(net):
    return {n: w.detach().clone() for n, w in net.weights().items()}


def test_entries_outside_the_mask_stay_bit_identical_under_adamw_with_decay(student) -> None:
    chosen = masked(student)
    student.set_trainable(chosen)
    before = copy(student.backbone)
    for count in (6, 5, 4):
        assert student.step(student.clip_loss(*batch(count)))
    after = copy(student.backbone)
    for name, weight in after.items():
        mask = chosen.mask.get(name, torch.zeros_like(weight, dtype=torch.bool))
        assert torch.equal(weight[~mask], before[name][~mask]), name
    assert all((after[n][m] != before[n][m]).any() for n, m in chosen.mask.items())


def test_a_masked_step_equals_dense_adamw_on_the_selected_entries(student, tiny) -> None:
    chosen = masked(student)
    dense = tiny.shared_copy(own=list(tiny.weights()))
    reference = {n: w.requires_grad_(True) for n, w in dense.first_mlp_weights().items()}
    optimizer = torch.optim.AdamW(reference.values(), lr=1e-2, weight_decay=0.2)
    other = Student(tiny.shared_copy(own=list(tiny.weights())), lr=1e-2, weight_decay=0.2)
    other.add_classes(NAMES, Prompts())
    other.set_trainable(chosen)
    theirs = Student.__new__(Student)  # the same loss on the dense copy
    theirs.__dict__ |= other.__dict__ | {"net": dense}
    for count in (6, 5, 4):
        other.step(other.clip_loss(*batch(count)))
        loss = theirs.clip_loss(*batch(count))
        optimizer.zero_grad()
        loss.backward()
        kept = {n: w.detach().clone() for n, w in reference.items()}
        optimizer.step()
        with torch.no_grad():  # undo what a masked step must not do
            for n, w in reference.items():
                w.copy_(torch.where(chosen.mask[n], w, kept[n]))
    for name, weight in other.net.first_mlp_weights().items():
        torch.testing.assert_close(weight, reference[name], rtol=1e-4, atol=1e-5)


def test_optimizer_state_exists_only_for_the_selected_entries(student) -> None:
    chosen = masked(student)
    student.set_trainable(chosen)
    student.step(student.clip_loss(*batch()))
    for path, value in student.optimizer_state().items():
        name, _, key = path.rpartition("/")
        if key != "step":
            assert value.numel() == int(chosen.mask[name].sum())
    assert all(w.grad is None for w in student.backbone.weights().values())


def test_positions_are_small_and_held_once(student) -> None:
    """Where twins can differ is where weights move, until they have moved elsewhere too."""
    student.set_trainable(masked(student))
    for name, entries in student.trainable.items():
        assert entries.indices.dtype == torch.int32
        assert student.differing[name] is entries.indices
    student.set_trainable(masked(student, 0.05))  # the same random numbers: inside the first
    for name, entries in student.trainable.items():
        assert len(student.differing[name]) > len(entries.indices)
    student.set_trainable(masked(student))
    for name, entries in student.trainable.items():
        assert student.differing[name] is entries.indices


def test_frozen_tensors_get_no_gradient(student) -> None:
    student.set_trainable(masked(student))
    assert {n for n, w in student.backbone.weights().items() if w.requires_grad} == set(
        student.backbone.first_mlp_weights()
    )


def test_a_batch_of_one_changes_nothing(student) -> None:
    student.set_trainable(Selection(tuple(student.backbone.weights())))
    student.step(student.clip_loss(*batch()))  # moments are not empty
    before = copy(student.backbone)
    assert not student.step(student.clip_loss(*batch(1)))
    assert all(torch.equal(w, before[n]) for n, w in student.backbone.weights().items())


def test_what_was_assigned_is_not_overwritten_by_the_next_step(student) -> None:
    chosen = masked(student)
    student.set_trainable(chosen)
    student.step(student.clip_loss(*batch()))
    name = chosen.names[0]
    student.assign({name: torch.zeros_like(student.backbone.weights()[name])})
    student.step(student.clip_loss(*batch()))
    moved = student.backbone.weights()[name].detach()[chosen.mask[name]]
    assert moved.abs().max() < 0.05  # a step away from zero, not from where it was


def test_a_twin_stops_sharing_what_may_move_and_only_that(student) -> None:
    twin = student.shared_copy()
    mine, theirs = student.backbone.weights(), twin.weights()
    assert all(theirs[n] is mine[n] for n in mine)
    student.set_trainable(masked(student))
    theirs = twin.weights()
    assert {n for n in mine if theirs[n] is not mine[n]} == set(
        student.backbone.first_mlp_weights()
    )


def test_the_teacher_follows_fast_inside_the_mask_and_slowly_outside(student) -> None:
    teacher = student.shared_copy()
    chosen = masked(student)
    student.set_trainable(chosen)
    name = chosen.names[0]
    before = teacher.weights()[name].detach().clone()
    student.assign({name: before + 1})
    student.ema_update(teacher, active=0.8, frozen=0.99)
    moved = teacher.weights()[name].detach() - before
    inside = chosen.mask[name]
    torch.testing.assert_close(moved[inside], torch.full_like(moved[inside], 0.2))
    torch.testing.assert_close(
        moved[~inside], torch.full_like(moved[~inside], 0.01), rtol=1e-3, atol=1e-6
    )


def test_smoothing_where_twins_can_differ_is_smoothing_everywhere(student) -> None:
    """Two masks after one another, a look at where twins differ, and the same bits as Eq. 3."""
    teacher = student.shared_copy()
    wanted = {n: w.detach().clone() for n, w in student.backbone.first_mlp_weights().items()}
    for turn, share in enumerate((0.1, 0.02, 0.05)):
        chosen = masked(student, share)
        student.set_trainable(chosen)
        if turn == 2:
            student.assign(copy(student.backbone))  # from outside: now they could differ anywhere
            assert all(at is None for at in student.differing.values())
            student.find_differences()
        found = student.differing[chosen.names[0]]
        assert 0 < len(found) < 0.15 * wanted[chosen.names[0]].numel()
        student.step(student.clip_loss(*batch()))
        student.ema_update(teacher, active=0.8, frozen=0.99)
        for name, old in wanted.items():
            p = momentum_tensor(chosen.mask[name], active=0.8, frozen=0.99)
            new = student.backbone.weights()[name].detach()
            wanted[name] = old + (new - old) * (1 - p)
            assert torch.equal(teacher.weights()[name], wanted[name])


@pytest.mark.parametrize(("names", "times"), [("first_mlp", 1), ("towers", 2)])
def test_two_experts_go_through_the_trunk_once_if_it_is_the_same(student, names, times) -> None:
    """And label and learn as if each had gone alone."""
    method = DoSAPP()
    method.setup(student)
    student.set_trainable(Selection(tuple(getattr(student.backbone, names)())))
    pixels, _ = batch()
    student.step(student.clip_loss(*batch()))
    method.after_stream_step(student)  # now they differ
    passed = []
    for net in (student.backbone, method.teacher):
        for tower in (net.model.vision_model, net.model.text_model):
            tower.encoder.layers[0].self_attn.q_proj.register_forward_hook(
                lambda module, given, made: passed.append(len(made))
            )
    guess = method.stream_loss(student, pixels)
    assert passed == [len(pixels), len(NAMES)] * times
    mine, theirs = (student.logits(pixels, net) for net in (student.backbone, method.teacher))
    assert torch.equal(guess.labels, max_logit_labels(theirs, mine))
    images, texts = student.backbone.encode_image(pixels), student.encode_captions()
    assert torch.equal(
        guess.loss, clip_loss(images, texts[guess.labels], student.backbone.logit_scale)
    )


def test_evaluation_features_are_cached_until_a_weight_moves(student) -> None:
    names = dict.fromkeys(NAMES, Prompts())
    first = student.text_head.class_embeddings(student.backbone, names)
    assert student.text_head.class_embeddings(student.backbone, names) is first
    student.set_trainable(masked(student))
    student.step(student.clip_loss(*batch()))
    again = student.text_head.class_embeddings(student.backbone, names)
    assert again is not first
    assert not torch.equal(again, first)


def test_templates_are_averaged_and_normalised(student) -> None:
    two = Prompts(evaluate=("a photo of a {}.", "a {}."))
    mixed = {NAMES[0]: two, NAMES[1]: Prompts()}
    found = student.text_head.class_embeddings(student.backbone, mixed)
    texts = student.backbone.encode_text([t.format(NAMES[0]) for t in two.evaluate])
    expected = torch.nn.functional.normalize(texts.mean(0), dim=0)
    torch.testing.assert_close(found[0], expected)
    assert found.norm(dim=1).tolist() == pytest.approx([1, 1])


def test_a_diverged_loss_is_a_sentence(student) -> None:
    student.set_trainable(masked(student))
    with pytest.raises(InputError, match="the loss became nan at step 0"):
        student.step(torch.tensor(float("nan"), requires_grad=True))


def test_a_student_that_is_no_longer_needed_is_let_go() -> None:
    """A service makes one for every version: what their weights hold must not hold them."""
    net = random_clip(small())
    student = Student(net, lr=1e-3, weight_decay=0.0)
    weights = net.first_mlp_weights()
    student.select(
        Selection(tuple(weights), top_fraction({n: w.detach() for n, w in weights.items()}, 0.1))
    )
    gone = [weakref.ref(weight) for weight in weights.values()]
    del net, student, weights
    gc.collect()
    assert all(ref() is None for ref in gone)
