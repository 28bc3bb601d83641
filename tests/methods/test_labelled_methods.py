"""ZSCL, L2P, DualPrompt, SLCA, SparCL and SPU's variants against arithmetic written out here."""

from dataclasses import replace

import pytest
import torch
from torch import tensor
from torch.nn.functional import normalize

from dosapp.backbones.base import TowerHooks
from dosapp.backbones.tower import Tokens, apply_block
from dosapp.backbones.wrappers import find_wrapper
from dosapp.errors import InputError
from dosapp.experiments.plan import build_scenario, plan
from dosapp.functional.losses import masked_cross_entropy, soft_cross_entropy
from dosapp.learner.learner import Learner
from dosapp.methods.base import Batch
from dosapp.methods.class_gaussians import RIDGE, Gaussians
from dosapp.methods.prompting import Pool, Prefixes
from dosapp.methods.sparcl import grown
from dosapp.methods.spu import SPU, ReleasedSPU
from support import method_checks


@pytest.fixture
def encode_shared_trunk(small, tiny):
    """A learner of a method with some of its lessons taught."""

    def make(method: str, sessions: float = 1, **changes: object):
        settings = small(method=method, **changes)
        learner = Learner(settings.learner(), tiny)
        stream = build_scenario(settings, tiny.preprocess)
        for t in range(int(sessions)):
            learner.learn(stream.session(t))
        if sessions % 1:
            lessons = learner.training_steps(stream.session(int(sessions)))
            next(lessons)
            learner.rest = lessons
        return learner, stream

    return make


class TestZSCL:
    references = {"references": "signs"}

    def test_keeps_the_original_answers_both_ways_softened_and_times_t_squared(self, begun) -> None:
        learner, _ = begun("zscl", 0.5, options=self.references | {"look": 6})
        method, student = learner.method, learner.student
        part, classes = method.found.train, method.found.classes
        rows = torch.randperm(len(part.labels), generator=student.rng("references"))[:6]
        pixels = part.pictures.read(rows.numpy()).float() / 255
        words = [method.found.prompts.caption(classes[part.labels[row]]) for row in rows]
        texts = method.original.encode_text(words)
        old = (
            student.backbone.logit_scale * method.original.encode_image(pixels) @ texts.T / 2
        ).tolist()
        new = (
            student.backbone.logit_scale * student.backbone.encode_image(pixels) @ texts.T / 2
        ).tolist()
        total = 0.0
        for flip in (False, True):
            a, b = (tensor(new).T, tensor(old).T) if flip else (tensor(new), tensor(old))
            for row in range(6):
                p, q = b[row].softmax(0), a[row].softmax(0)
                total -= float((p * q.log()).sum()) / 6
        assert method.strayed(student).item() == pytest.approx(4 * total, rel=1e-4)

    def test_the_average_of_weights_is_the_model_when_the_session_ends(self, begun, small) -> None:
        options = self.references | {"every": 2, "weight": 0.0, "look": 1}
        learner, _ = begun("zscl", 0.5, options=options)
        name = "visual_projection.weight"
        weight = learner.student.backbone.weights()[name]
        start = learner.method.original.weights()[name].detach().clone()
        samples, step = [start], 1
        for _ in learner.rest:
            step += 1
            if step % 2 == 0:
                samples.append(weight.detach().clone())
        expected = torch.stack(samples).mean(dim=0)
        torch.testing.assert_close(learner.student.backbone.weights()[name].detach(), expected)
        assert not torch.allclose(expected, samples[-1], atol=1e-6)

    def test_without_references_it_says_so_before_anything(self, pupil) -> None:
        with pytest.raises(InputError, match="zscl needs reference pictures"):
            Learner(pupil(method="zscl"))

    def test_references_from_ones_own_csv(self, pupil, tiny, small, tmp_path) -> None:
        from PIL import Image

        for n in range(6):
            Image.new("RGB", (40, 40), (40 * n, 0, 0)).save(tmp_path / f"{n}.png")
        lines = [f"{n}.png,wall {n % 2},{'train' if n < 4 else 'test'}" for n in range(6)]
        (tmp_path / "r.csv").write_text("path,label,split\n" + "\n".join(lines))
        options = {"references": str(tmp_path / "r.csv")}
        method = Learner(pupil(method="zscl", options=options), tiny).method
        assert method.looked_up(tiny).classes == ("wall 0", "wall 1")
        zscl = small(method="zscl", adapt="dosapp", options=options)
        before = plan(zscl).key
        assert plan(zscl).key == before
        Image.new("RGB", (40, 40), (0, 200, 0)).save(tmp_path / "1.png")
        assert plan(zscl).key != before  # another picture under the same name is another result

    def test_only_lessons_need_the_references(self, pupil, tiny, tmp_path) -> None:
        from PIL import Image

        for n in range(12):
            (tmp_path / "refs" / f"wall {n % 2}").mkdir(parents=True, exist_ok=True)
            picture = Image.new("RGB", (40, 40), (20 * n, 0, 0))
            picture.save(tmp_path / "refs" / f"wall {n % 2}" / f"{n}.png")
        options = {"references": str(tmp_path / "refs"), "look": 2}
        learner = Learner(pupil(method="zscl", options=options, epochs=1), tiny)
        shape = (4, 3, tiny.image_size, tiny.image_size)
        lesson = {
            name: torch.full(shape, shade, dtype=torch.uint8)
            for name, shade in (("fox", 90), ("wolf", 30))
        }
        learner.learn(lesson)
        learner.save(tmp_path / "x")
        (tmp_path / "refs").rename(tmp_path / "moved")
        again = Learner.load(tmp_path / "x")
        assert again.predict(lesson["fox"]) == learner.predict(lesson["fox"])
        assert len(Learner.open_history(tmp_path / "x").versions()) == 1
        with pytest.raises(InputError, match=r"refs' does not exist"):
            again.learn(lesson)


class TestL2P:
    def test_takes_the_nearest_keys_of_each_picture_or_of_the_batch(self, tiny) -> None:
        likeness = tensor([[0.9, 0.1, 0.8], [0.9, 0.2, 0.1], [0.0, 0.7, 0.6]])
        alone = Pool(tiny, 3, 1, 2, False, 0).nearest(likeness)
        assert [sorted(row) for row in alone.tolist()] == [[0, 2], [0, 1], [1, 2]]
        likeness[2] = tensor([0.6, 0.1, 0.2])  # votes: 3 for key 0, 2 for key 2, 1 for key 1
        together = Pool(tiny, 3, 1, 2, True, 0).nearest(likeness)
        assert [sorted(row) for row in together.tolist()] == [[0, 2]] * 3

    def test_prompts_of_the_chosen_keys_join_the_patches(self, tiny) -> None:
        pool, pixels = Pool(tiny, 4, 3, 2, False, 0), torch.rand(2, 3, 32, 32)
        query = tiny.encode_image(pixels)
        cosines = query @ normalize(pool.extra["l2p.keys"], dim=1).T
        found = cosines.topk(2, dim=1).indices
        prompts = torch.stack([pool.extra["l2p.prompts"][row].reshape(6, 128) for row in found])
        by_hand = tiny.encode_image(pixels, TowerHooks(prompts=prompts))
        torch.testing.assert_close(pool.encode_image(pixels), by_hand)
        expected = sum(cosines[b, k] for b in range(2) for k in found[b]) / 2
        assert pool.near.mean().item() == pytest.approx(expected.item(), rel=1e-5)

    def test_only_the_sessions_classes_compete_but_all_do_for_replayed(self) -> None:
        logits, labels = tensor([[1.0, 2.0, 3.0]] * 2), tensor([1, 0])
        allowed = tensor([[False, True, True], [True, True, True]])
        first = -torch.log_softmax(tensor([2.0, 3.0]), 0)[0]
        second = -torch.log_softmax(tensor([1.0, 2.0, 3.0]), 0)[0]
        assert masked_cross_entropy(logits, labels, allowed).item() == pytest.approx(
            ((first + second) / 2).item()
        )

    def test_moves_nothing_of_the_towers(self, begun, tiny) -> None:
        before = {n: w.detach().clone() for n, w in tiny.weights().items()}
        learner, _ = begun("l2p", 2)
        after = learner.student.backbone.weights()
        assert all(torch.equal(after[n], w) for n, w in before.items())
        assert learner.student.trained_names == {"l2p.prompts", "l2p.keys"}

    def test_cannot_take_more_than_there_are(self, pupil) -> None:
        with pytest.raises(InputError, match="cannot take 5 of 3 prompts"):
            Learner(pupil(method="l2p", options={"pool": 3}))


class TestDualPrompt:
    def test_prefixes_have_their_shapes_and_places(self, tiny) -> None:
        net = Prefixes(tiny, 10, 5, 2, 3, 0)
        assert net.extra["dualprompt.general"].shape == (2, 2, 5, 128)
        assert net.extra["dualprompt.expert"].shape == (10, 2, 2, 5, 128)  # tiny has four blocks
        assert (list(net.general), list(net.expert)) == ([0, 1], [2, 3])
        assert net.encode_image(torch.rand(3, 3, 32, 32)).shape == (3, tiny.features)

    def test_a_prefix_of_minus_infinity_is_no_prefix(self, tiny) -> None:
        """Keys nobody attends to change nothing: the block is the library's own."""
        pixels = torch.rand(2, 3, 32, 32)
        far = torch.zeros(2, 2, 1, 128)
        with torch.no_grad():
            for layer in tiny.model.vision_model.encoder.layers:
                layer.self_attn.q_proj.weight.zero_()  # all queries are the same,
                layer.self_attn.q_proj.bias.fill_(1.0)  # and far from the key of the prefix
            far[0] = -1e4
            plain = tiny.encode_image(pixels)
            prefixed = tiny.encode_image(pixels, TowerHooks(prefixes=dict.fromkeys(range(4), far)))
        torch.testing.assert_close(prefixed, plain)

    def test_attention_sees_prefixes_as_more_keys_and_values(self, tiny) -> None:
        layer, tokens = tiny.model.vision_model.encoder.layers[0], torch.randn(1, 3, 128)
        prefix, attention = torch.randn(2, 1, 2, 128), layer.self_attn
        seen = layer.layer_norm1(tokens)[0]
        q, k, v = (
            attention.q_proj(seen),
            torch.cat([prefix[0, 0], attention.k_proj(seen)]),
            torch.cat([prefix[1, 0], attention.v_proj(seen)]),
        )
        size, parts = attention.head_dim, []
        for head in range(128 // size):
            cut = slice(head * size, (head + 1) * size)
            share = (q[:, cut] @ k[:, cut].T / size**0.5).softmax(dim=1)  # [3, 2 + 3]
            parts.append(share @ v[:, cut])
        middle = tokens[0] + attention.out_proj(torch.cat(parts, dim=1))
        by_hand = middle + layer.mlp(layer.layer_norm2(middle))
        every = Tokens(tokens, at=torch.tensor([1]))
        torch.testing.assert_close(apply_block(layer, every, prefix, False).rows[0], by_hand)
        ended = apply_block(layer, every, prefix, True).rows[0]  # only what is read goes on
        torch.testing.assert_close(ended, by_hand[1:2])

    def test_a_session_teaches_its_own_set_which_begins_where_the_last_ended(self, begun) -> None:
        learner, stream = begun("dualprompt", 1)
        sets = learner.student.backbone.weights()["dualprompt.expert"]
        first = sets.detach().clone()
        lessons = learner.training_steps(stream.session(1))
        next(lessons)
        assert torch.equal(sets[0], first[0])
        assert torch.equal(sets[2:], first[2:])
        begun_at = (sets[1] - first[0]).abs().max()  # one step of AdamW away
        assert 0 < begun_at < 2 * learner.student.lr + 0.2 * learner.student.lr
        assert learner.method.route.teaching
        for _ in lessons:
            pass
        assert not learner.method.route.teaching
        assert learner.method.route.known == 2

    def test_afterwards_the_nearest_known_key_decides(self, begun, tiny) -> None:
        learner, stream = begun("dualprompt", 2)
        net, pixels = (
            find_wrapper(learner.student.backbone, Prefixes),
            stream.tasks[0].test.read(range(4)),
        )
        cosines = tiny.encode_image(pixels) @ normalize(net.extra[net.keys], dim=1)[:2].T
        net.encode_image(pixels)
        torch.testing.assert_close(net.near, cosines.max(dim=1).values)

    def test_more_sessions_than_sets_is_a_sentence(self, begun) -> None:
        learner, stream = begun("dualprompt", 1, options={"pool": 1})
        before = learner.digest()
        with pytest.raises(InputError, match="prefixes for 1 sessions and this is number 2"):
            learner.learn(stream.session(1))
        assert learner.digest() == before


class TestSLCA:
    def test_draws_from_the_gaussian_of_each_class_with_older_means_shrunk(self) -> None:
        generator = torch.Generator().manual_seed(0)
        mixing = tensor([[2.0, 0.0], [1.0, 0.5]])
        features = torch.randn(4000, 2, generator=generator) @ mixing.T + tensor([10.0, -5.0])
        gaussians = Gaussians()
        gaussians.learn(0, features, 1)
        gaussians.learn(1, features * 0 + tensor([3.0, 3.0]), 2)
        drawn, labels = gaussians.draw(8000, 2, generator)
        old, new = drawn[labels == 0], drawn[labels == 1]
        assert abs(len(old) - len(new)) < 400
        torch.testing.assert_close(old.mean(0), tensor([10.0, -5.0]) * 0.95, atol=0.15, rtol=0)
        expected = mixing @ mixing.T
        torch.testing.assert_close(old.T.cov(), expected, atol=0.3, rtol=0)
        torch.testing.assert_close(new.mean(0), tensor([3.0, 3.0]), atol=0.01, rtol=0)
        assert new.std(0).max() == pytest.approx(RIDGE**0.5, rel=0.1)  # one point, and the ridge

    def test_projections_learn_faster_than_the_rest(self, begun) -> None:
        learner, _ = begun("slca", 0.5)
        groups = learner.student._optimizer.param_groups
        rates = dict(zip(learner.student.selection.names, (g["lr"] for g in groups), strict=True))
        fast = set(learner.student.backbone.projection_weights())
        assert {n for n, r in rates.items() if r == pytest.approx(5 * learner.student.lr)} == fast
        assert len(fast) == 2

    def test_after_the_first_session_the_projections_alone_are_aligned(self, begun) -> None:
        learner, stream = begun("slca", 1)
        seen = []
        for lesson in learner.training_steps(stream.session(1)):
            seen.append((lesson.number, lesson.of, learner.student.selection.names))
        steps, total = len(seen), seen[0][1]
        assert steps == total == 2 * 3 + 3 * 6  # two epochs of three batches; three passes of six
        assert {len(names) for _, _, names in seen[6:]} == {2}
        assert len(seen[5][2]) > 100

    def test_the_alignment_takes_out_the_norm_of_each_sessions_logits(self, begun) -> None:
        learner, stream = begun("slca", 1)
        student, method = learner.student, learner.method
        lessons = learner.training_steps(stream.session(1))
        for lesson in lessons:
            if lesson.number == 7:
                break
        drawn, labels = method.classes.draw(256, 2, student.rng("alignment", 3))
        logits = student.backbone.project_image(drawn) @ student.encode_captions().T
        first, second = logits[:, :3].norm(dim=1), logits[:, 3:].norm(dim=1)
        scaled = logits / ((first + second) / 2)[:, None] / 0.1
        by_hand = torch.nn.functional.cross_entropy(scaled, labels)
        torch.testing.assert_close(method.aligned(student, None, 3), by_hand)

    def test_a_class_without_pictures_is_a_sentence(self, begun) -> None:
        learner, stream = begun("slca", 0)
        full = stream.session(0)
        prompts = {**full.prompts, "nothing": full.prompts[full.classes[0]]}
        empty = replace(full, classes=(*full.classes, "nothing"), prompts=prompts)
        with pytest.raises(InputError, match="'nothing' has no training images, so slca"):
            learner.learn(empty)


class TestSparCL:
    def test_a_mask_grows_at_random_to_its_density(self) -> None:
        mask = torch.zeros(10, 10, dtype=torch.bool)
        mask[0, :4] = True
        full = grown(mask, 0.05, torch.Generator().manual_seed(0))
        assert int(full.sum()) == 5
        assert full[mask].all()
        other = grown(mask, 0.05, torch.Generator().manual_seed(1))
        assert not torch.equal(full, other)

    def test_importance_is_the_weight_and_half_the_gradient(self, begun) -> None:
        learner, stream = begun("sparcl", 0, options={"kept": 0.05})
        learner._register_classes(stream.session(0))
        session, student = stream.session(0), learner.student
        batch = Batch(session.train.read(range(8)), tensor(session.train.labels[:8]), None)
        name, weight = next(iter(student.backbone.linear_weights().items()))
        mask = learner.method.mask(student, 0, learner.method.importance(student, [batch]))[name]
        weight.requires_grad_(True)
        loss = student.clip_loss(batch.pixels, batch.labels)
        (grad,) = torch.autograd.grad(loss, weight)
        importance = (weight.abs() + 0.5 * grad.abs()).flatten()
        top = importance.topk(int(0.05 * weight.numel())).indices
        assert mask.flatten()[top].all()
        assert int(mask.sum()) == len(top)

    def test_five_per_cent_of_every_matrix_moves_and_nothing_else(self, begun, tiny) -> None:
        before = {n: w.detach().clone() for n, w in tiny.weights().items()}
        learner, _ = begun("sparcl", 1)
        for name, weight in learner.student.backbone.weights().items():
            moved = int((weight != before[name]).sum())
            allowed = int(0.05 * weight.numel()) if name in tiny.linear_weights() else 0
            assert moved <= allowed
            assert bool(moved) == bool(allowed)

    def test_the_mask_changes_between_epochs_and_moments_of_what_stays_do_not(self, begun) -> None:
        learner, stream = begun("sparcl", 0, epochs=2, options={"every": 1})
        lessons = learner.training_steps(stream.session(0))
        for _ in range(3):
            next(lessons)
        student = learner.student
        name = next(iter(student.selection.names))
        old = student.selection.mask[name]
        moments = student._parameters[name].spread(student.optimizer_state()[f"{name}/exp_avg_sq"])
        importance = learner.method.importance(student, learner_batches(learner, stream))
        student.change_mask(learner.method.mask(student, 1, importance))
        new = student.selection.mask[name]
        kept = student._parameters[name].spread(student.optimizer_state()[f"{name}/exp_avg_sq"])
        stayed = old & new
        assert stayed.any()
        assert (new & ~old).any()
        assert torch.equal(kept[stayed], moments[stayed])
        assert not kept[new & ~old].any()
        assert student.session_selection is student.selection  # adapters inherit the newest


def learner_batches(learner, stream):
    session = stream.session(0)
    yield Batch(session.train.read(range(8)), tensor(session.train.labels[:8]), None)


class TestSPU:
    def test_scores_by_the_clip_loss_or_by_the_output_norm(self, begun) -> None:
        learner, stream = begun("spu", 1)
        batch = next(learner_batches(learner, stream))
        student = learner.student
        images, texts = student.encode_pairs(batch.pixels, batch.labels)
        rows = (student.backbone.logit_scale * images @ texts.T).tolist()
        by_hand = sum(sum(x * x for x in row) for row in rows) / len(rows)
        assert ReleasedSPU().score(student, batch).item() == pytest.approx(by_hand, rel=1e-4)
        clip = student.clip_loss(batch.pixels, batch.labels)
        assert SPU().score(student, batch).item() == pytest.approx(clip.item())

    def test_the_released_preset_is_those_settings_by_one_name(self) -> None:
        assert (
            ReleasedSPU().hyperparameters()
            == SPU(output_norm=True, quarter=True, beside="biases and projection").hyperparameters()
        )

    def test_a_quarter_of_the_batches_can_be_enough_to_score(self, begun) -> None:
        learner, stream = begun("spu", 1)
        seen = []

        class Counting(SPU):
            def score(self, student, batch):
                seen.append(batch)
                return super().score(student, batch)

        batches = [next(learner_batches(learner, stream))] * 8
        Counting(quarter=True).choose(learner.student, batches)
        assert len(seen) == 2
        Counting().choose(learner.student, batches)
        assert len(seen) == 2 + 8


def test_cross_entropy_to_a_distribution_by_hand() -> None:
    logits, target = tensor([[1.0, 0.0]]), tensor([[0.3, 0.7]])
    p = torch.softmax(logits, 1)[0]
    by_hand = -(0.3 * p[0].log() + 0.7 * p[1].log())
    assert soft_cross_entropy(logits, target).item() == pytest.approx(by_hand.item())


def test_er_with_capacity_zero_stores_nothing_and_less_is_a_sentence(small, tiny) -> None:
    learner, _ = method_checks.lived(small(method="flyp", buffer_size=0), tiny, 1)
    assert len(learner.replay_buffer) == 0
    with pytest.raises(InputError, match="memory is -1"):
        small(method="flyp", memory=-1)
    with pytest.raises(InputError, match="memory of 1 pictures cannot keep one of each of 2"):
        plan(small(method="flyp", buffer_size=1))
