"""The student: the one place where weights change."""

import gc
import weakref

import pytest
import torch

from dosapp.bench.model import random_clip, small
from dosapp.data.base import Prompts
from dosapp.errors import DivergedError
from dosapp.functional.ema import momentum_tensor
from dosapp.functional.losses import clip_loss
from dosapp.functional.masks import top_fraction
from dosapp.functional.pseudo_labels import max_logit_labels
from dosapp.methods.dosapp import DoSAPP
from dosapp.student.student import Student
from dosapp.student.trainable_weights import Selection

NAMES = ["red plain circle", "blue striped square", "green dotted star"]


@pytest.fixture
def student(tiny):
    student = Student(tiny, lr=1e-2, weight_decay=0.2)
    student.text_head.add_classes(NAMES, Prompts())
    return student


def make_batch(count: int = 6):
    """Random images and labels."""
    generator = torch.Generator().manual_seed(count)
    pixels = torch.rand(count, 3, 32, 32, generator=generator)
    return pixels, torch.arange(count) % len(NAMES)


def random_selection(student, share: float = 0.1) -> Selection:
    """A random mask inside each candidate; of two shares, the smaller mask is inside the larger."""
    weights = student.backbone.first_mlp_weights()
    generator = torch.Generator().manual_seed(0)
    mask = {n: torch.rand(w.shape, generator=generator) < share for n, w in weights.items()}
    return Selection(tuple(weights), mask)


def copy_weights(backbone):
    return {n: w.detach().clone() for n, w in backbone.weights().items()}


def test_entries_outside_the_mask_stay_bit_identical_under_adamw_with_decay(student) -> None:
    selection = random_selection(student)
    student.set_trainable(selection)
    before = copy_weights(student.backbone)
    for count in (6, 5, 4):
        assert student.step(student.clip_loss(*make_batch(count)))
    after = copy_weights(student.backbone)
    for name, weight in after.items():
        mask = selection.mask.get(name, torch.zeros_like(weight, dtype=torch.bool))
        assert torch.equal(weight[~mask], before[name][~mask]), name
    assert all((after[n][m] != before[n][m]).any() for n, m in selection.mask.items())


def test_a_masked_step_equals_dense_adamw_on_the_selected_entries(student, tiny) -> None:
    selection = random_selection(student)
    dense = Student(tiny.shared_copy(unshared=list(tiny.weights())))
    dense.text_head.add_classes(NAMES, Prompts())
    reference = {n: w.requires_grad_(True) for n, w in dense.backbone.first_mlp_weights().items()}
    optimizer = torch.optim.AdamW(reference.values(), lr=1e-2, weight_decay=0.2)
    student.set_trainable(selection)
    for count in (6, 5, 4):
        student.step(student.clip_loss(*make_batch(count)))
        loss = dense.clip_loss(*make_batch(count))
        optimizer.zero_grad()
        loss.backward()
        before = {n: w.detach().clone() for n, w in reference.items()}
        optimizer.step()
        with torch.no_grad():  # undo what a masked step must not do
            for n, w in reference.items():
                w.copy_(torch.where(selection.mask[n], w, before[n]))
    for name, weight in student.backbone.first_mlp_weights().items():
        torch.testing.assert_close(weight, reference[name], rtol=1e-4, atol=1e-5)


def test_optimizer_state_exists_only_for_the_selected_entries(student) -> None:
    selection = random_selection(student)
    student.set_trainable(selection)
    student.step(student.clip_loss(*make_batch()))
    for path, value in student.optimizer_state().items():
        name, _, key = path.rpartition("/")
        if key != "step":
            assert value.numel() == int(selection.mask[name].sum())
    assert all(w.grad is None for w in student.backbone.weights().values())


def test_indices_are_small_and_stored_once(student) -> None:
    """Copies can differ where the student trains; earlier selections are added."""
    student.set_trainable(random_selection(student))
    for name, parameter in student.trainable.items():
        assert parameter.indices.dtype == torch.int32
        assert student.differing_indices[name] is parameter.indices
    student.set_trainable(random_selection(student, 0.05))  # inside the first
    for name, parameter in student.trainable.items():
        assert len(student.differing_indices[name]) > len(parameter.indices)
    student.set_trainable(random_selection(student))
    for name, parameter in student.trainable.items():
        assert student.differing_indices[name] is parameter.indices


def test_frozen_tensors_get_no_gradient(student) -> None:
    student.set_trainable(random_selection(student))
    assert {n for n, w in student.backbone.weights().items() if w.requires_grad} == set(
        student.backbone.first_mlp_weights()
    )


def test_a_batch_of_one_changes_nothing(student) -> None:
    student.set_trainable(Selection(tuple(student.backbone.weights())))
    student.step(student.clip_loss(*make_batch()))  # moments are not empty
    before = copy_weights(student.backbone)
    assert not student.step(student.clip_loss(*make_batch(1)))
    assert all(torch.equal(w, before[n]) for n, w in student.backbone.weights().items())


def test_assigned_values_are_not_overwritten_by_the_next_step(student) -> None:
    selection = random_selection(student)
    student.set_trainable(selection)
    student.step(student.clip_loss(*make_batch()))
    name = selection.names[0]
    student.assign({name: torch.zeros_like(student.backbone.weights()[name])})
    student.step(student.clip_loss(*make_batch()))
    values = student.backbone.weights()[name].detach()[selection.mask[name]]
    assert values.abs().max() < 0.05  # one step from zero, not from the old value


def test_a_shared_copy_owns_only_the_weights_that_train(student) -> None:
    copy = student.shared_copy()
    weights, copied = student.backbone.weights(), copy.weights()
    assert all(copied[n] is weights[n] for n in weights)
    student.set_trainable(random_selection(student))
    copied = copy.weights()
    own = {n for n in weights if copied[n] is not weights[n]}
    assert own == set(student.backbone.first_mlp_weights())


def test_the_teacher_follows_fast_inside_the_mask_and_slowly_outside(student) -> None:
    teacher = student.shared_copy()
    selection = random_selection(student)
    student.set_trainable(selection)
    name = selection.names[0]
    before = teacher.weights()[name].detach().clone()
    student.assign({name: before + 1})
    student.ema_update(teacher, active_momentum=0.8, frozen_momentum=0.99)
    change = teacher.weights()[name].detach() - before
    inside = selection.mask[name]
    torch.testing.assert_close(change[inside], torch.full_like(change[inside], 0.2))
    torch.testing.assert_close(
        change[~inside], torch.full_like(change[~inside], 0.01), rtol=1e-3, atol=1e-6
    )


def test_updating_only_differing_entries_gives_the_bits_of_equation_3(student) -> None:
    """With several masks after one another, and after comparing all entries."""
    teacher = student.shared_copy()
    expected = {n: w.detach().clone() for n, w in student.backbone.first_mlp_weights().items()}
    for turn, share in enumerate((0.1, 0.02, 0.05)):
        selection = random_selection(student, share)
        student.set_trainable(selection)
        if turn == 2:
            student.assign(copy_weights(student.backbone))  # copies could differ anywhere now
            assert all(indices is None for indices in student.differing_indices.values())
            student.rebuild_differing_indices()
        indices = student.differing_indices[selection.names[0]]
        assert 0 < len(indices) < 0.15 * expected[selection.names[0]].numel()
        student.step(student.clip_loss(*make_batch()))
        student.ema_update(teacher, active_momentum=0.8, frozen_momentum=0.99)
        for name, old in expected.items():
            p = momentum_tensor(selection.mask[name], active=0.8, frozen=0.99)
            new = student.backbone.weights()[name].detach()
            expected[name] = old + (new - old) * (1 - p)
            assert torch.equal(teacher.weights()[name], expected[name])


@pytest.mark.parametrize(("weights", "times"), [("first_mlp_weights", 1), ("own_weights", 2)])
def test_two_experts_share_a_forward_pass_of_an_equal_trunk(student, weights, times) -> None:
    """Labels and loss are those of separate forward passes."""
    method = DoSAPP()
    method.setup(student)
    student.set_trainable(Selection(tuple(getattr(student.backbone, weights)())))
    pixels, _ = make_batch()
    student.step(student.clip_loss(*make_batch()))
    method.after_stream_step(student)  # now they differ
    rows = []
    for expert in (student.backbone, method.teacher):
        for tower in (expert.model.vision_model, expert.model.text_model):
            tower.encoder.layers[0].self_attn.q_proj.register_forward_hook(
                lambda module, inputs, output: rows.append(len(output))
            )
    result = method.stream_loss(student, pixels)
    assert rows == [len(pixels), len(NAMES)] * times
    of_student, of_teacher = (
        student.score_images(pixels, expert) for expert in (student.backbone, method.teacher)
    )
    assert torch.equal(result.labels, max_logit_labels(of_teacher, of_student))
    images, texts = student.backbone.encode_image(pixels), student.encode_captions()
    loss = clip_loss(images, texts[result.labels], student.backbone.logit_scale)
    assert torch.equal(result.loss, loss)


def test_class_embeddings_are_cached_until_a_weight_changes(student) -> None:
    prompts = dict.fromkeys(NAMES, Prompts())
    first = student.text_head.class_embeddings(student.backbone, prompts)
    assert student.text_head.class_embeddings(student.backbone, prompts) is first
    student.set_trainable(random_selection(student))
    student.step(student.clip_loss(*make_batch()))
    again = student.text_head.class_embeddings(student.backbone, prompts)
    assert again is not first
    assert not torch.equal(again, first)


def test_templates_are_averaged_and_normalised(student) -> None:
    two = Prompts(evaluate=("a photo of a {}.", "a {}."))
    mixed = {NAMES[0]: two, NAMES[1]: Prompts()}
    embeddings = student.text_head.class_embeddings(student.backbone, mixed)
    texts = student.backbone.encode_text([t.format(NAMES[0]) for t in two.evaluate])
    expected = torch.nn.functional.normalize(texts.mean(0), dim=0)
    torch.testing.assert_close(embeddings[0], expected)
    assert embeddings.norm(dim=1).tolist() == pytest.approx([1, 1])


def test_a_nan_loss_is_a_diverged_error(student) -> None:
    student.set_trainable(random_selection(student))
    with pytest.raises(DivergedError, match="the loss became nan at step 0"):
        student.step(torch.tensor(float("nan"), requires_grad=True))


def test_an_unused_student_is_freed() -> None:
    """A service creates one per version; hooks on weights must not keep them alive."""
    backbone = random_clip(small())
    student = Student(backbone, lr=1e-3, weight_decay=0.0)
    weights = backbone.first_mlp_weights()
    student.select_for_session(
        Selection(tuple(weights), top_fraction({n: w.detach() for n, w in weights.items()}, 0.1))
    )
    references = [weakref.ref(weight) for weight in weights.values()]
    del backbone, student, weights
    gc.collect()
    assert all(ref() is None for ref in references)
