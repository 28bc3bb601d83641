"""ZSCL, L2P, DualPrompt, SLCA, SparCL and the variants of SPU, checked by hand."""

from dataclasses import replace

import pytest
import torch
from torch import tensor
from torch.nn.functional import normalize

from dosapp.backbones.base import TowerHooks
from dosapp.backbones.clip import describe_block
from dosapp.backbones.tower import Tokens, apply_block
from dosapp.backbones.wrappers import find_wrapper
from dosapp.errors import InputError
from dosapp.experiments.plan import build_scenario, plan
from dosapp.functional.losses import masked_cross_entropy, soft_cross_entropy
from dosapp.learner.learner import Learner
from dosapp.methods.base import Batch
from dosapp.methods.dualprompt import DualPrompt, PrefixPrompts
from dosapp.methods.l2p import PromptPool
from dosapp.methods.slca_gaussians import RIDGE, ClassGaussians
from dosapp.methods.sparcl import grow_mask
from dosapp.methods.spu import SPU, ReleasedSPU
from dosapp.testing.method_checks import train_learner


@pytest.fixture
def train_sessions(small, tiny):
    """A learner after some sessions; with a half, one step into the next (`learner.rest`)."""

    def make(method: str, sessions: float = 1, **changes: object):
        settings = small(method=method, **changes)
        learner = Learner(settings.learner(), tiny)
        scenario = build_scenario(settings, tiny.preprocess)
        for t in range(int(sessions)):
            learner.learn(scenario.session(t))
        if sessions % 1:
            learner.rest = learner.training_steps(scenario.session(int(sessions)))
            next(learner.rest)
        return learner, scenario

    return make


class TestZSCL:
    references = {"ref_dataset": "signs"}

    def test_distils_the_original_model_both_ways_times_t_squared(self, train_sessions) -> None:
        learner, _ = train_sessions("zscl", 0.5, options=self.references | {"ref_batch_size": 6})
        method, student = learner.method, learner.student
        dataset = method.references
        labels = dataset.train.labels
        rows = torch.randperm(len(labels), generator=student.rng("references"))[:6]
        pixels = dataset.train.images.read(rows.numpy()).float() / 255
        captions = [dataset.prompts.caption(dataset.classes[labels[row]]) for row in rows]
        texts = method.original.encode_text(captions)
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
        assert method.distillation(student).item() == pytest.approx(4 * total, rel=1e-4)

    def test_the_average_of_weights_is_the_model_when_the_session_ends(
        self, train_sessions
    ) -> None:
        options = self.references | {"avg_freq": 2, "distillation_weight": 0, "ref_batch_size": 1}
        learner, _ = train_sessions("zscl", 0.5, options=options)
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

    def test_missing_references_are_an_error_at_construction(self, learner_settings) -> None:
        with pytest.raises(InputError, match="zscl needs reference images"):
            Learner(learner_settings(method="zscl"))

    def test_references_from_a_csv(self, learner_settings, tiny, small, tmp_path) -> None:
        from PIL import Image

        for n in range(6):
            Image.new("RGB", (40, 40), (40 * n, 0, 0)).save(tmp_path / f"{n}.png")
        lines = [f"{n}.png,wall {n % 2},{'train' if n < 4 else 'test'}" for n in range(6)]
        (tmp_path / "r.csv").write_text("path,label,split\n" + "\n".join(lines))
        options = {"ref_dataset": str(tmp_path / "r.csv")}
        method = Learner(learner_settings(method="zscl", options=options), tiny).method
        assert method.load_references(tiny.preprocess).classes == ("wall 0", "wall 1")
        zscl = small(method="zscl", adapt="dosapp", options=options)
        before = plan(zscl).key
        assert plan(zscl).key == before
        Image.new("RGB", (40, 40), (0, 200, 0)).save(tmp_path / "1.png")
        assert plan(zscl).key != before  # another image under the same name is another result

    def test_only_training_needs_the_references(self, learner_settings, tiny, tmp_path) -> None:
        from PIL import Image

        for n in range(12):
            (tmp_path / "refs" / f"wall {n % 2}").mkdir(parents=True, exist_ok=True)
            image = Image.new("RGB", (40, 40), (20 * n, 0, 0))
            image.save(tmp_path / "refs" / f"wall {n % 2}" / f"{n}.png")
        options = {"ref_dataset": str(tmp_path / "refs"), "ref_batch_size": 2}
        learner = Learner(learner_settings(method="zscl", options=options, epochs=1), tiny)
        shape = (4, 3, tiny.image_size, tiny.image_size)
        images = {
            name: torch.full(shape, shade, dtype=torch.uint8)
            for name, shade in (("fox", 90), ("wolf", 30))
        }
        learner.learn(images)
        learner.save(tmp_path / "x")
        (tmp_path / "refs").rename(tmp_path / "renamed")
        again = Learner.load(tmp_path / "x")
        assert again.predict(images["fox"]) == learner.predict(images["fox"])
        assert len(Learner.open_history(tmp_path / "x").versions()) == 1
        with pytest.raises(InputError, match=r"refs' does not exist"):
            again.learn(images)


class TestL2P:
    def test_selects_the_nearest_keys_of_each_image_or_of_the_batch(self, tiny) -> None:
        sizes = {"pool_size": 3, "prompt_length": 1, "top_k": 2}
        similarities = tensor([[0.9, 0.1, 0.8], [0.9, 0.2, 0.1], [0.0, 0.7, 0.6]])
        selected = PromptPool(tiny, **sizes).select_keys(similarities)
        assert [sorted(row) for row in selected.tolist()] == [[0, 2], [0, 1], [1, 2]]
        similarities[2] = tensor([0.6, 0.1, 0.2])  # counts: 3 of key 0, 2 of key 2, 1 of key 1
        selected = PromptPool(tiny, **sizes, batchwise=True).select_keys(similarities)
        assert [sorted(row) for row in selected.tolist()] == [[0, 2]] * 3

    def test_prompts_of_the_selected_keys_join_the_patches(self, tiny) -> None:
        pool = PromptPool(tiny, pool_size=4, prompt_length=3, top_k=2)
        pixels = torch.rand(2, 3, 32, 32)
        cosines = tiny.encode_image(pixels) @ normalize(pool.added["l2p.keys"], dim=1).T
        keys = cosines.topk(2, dim=1).indices
        prompts = torch.stack([pool.added["l2p.prompts"][row].reshape(6, 128) for row in keys])
        by_hand = tiny.encode_image(pixels, TowerHooks(prompts=prompts))
        torch.testing.assert_close(pool.encode_image(pixels), by_hand)
        expected = sum(cosines[b, k] for b in range(2) for k in keys[b]) / 2
        assert pool.key_similarity.mean().item() == pytest.approx(expected.item(), rel=1e-5)

    def test_new_images_compete_within_the_session_and_replayed_ones_with_all(self) -> None:
        logits, labels = tensor([[1.0, 2.0, 3.0]] * 2), tensor([1, 0])
        allowed = tensor([[False, True, True], [True, True, True]])
        first = -torch.log_softmax(tensor([2.0, 3.0]), 0)[0]
        second = -torch.log_softmax(tensor([1.0, 2.0, 3.0]), 0)[0]
        assert masked_cross_entropy(logits, labels, allowed).item() == pytest.approx(
            ((first + second) / 2).item()
        )

    def test_changes_nothing_of_the_towers(self, train_sessions, tiny) -> None:
        before = {n: w.detach().clone() for n, w in tiny.weights().items()}
        learner, _ = train_sessions("l2p", 2)
        after = learner.student.backbone.weights()
        assert all(torch.equal(after[n], w) for n, w in before.items())
        assert learner.student.ever_selected == {"l2p.prompts", "l2p.keys"}

    def test_top_k_is_at_most_the_pool_size(self, learner_settings) -> None:
        with pytest.raises(InputError, match="cannot select top_k 5 of 3 prompts"):
            Learner(learner_settings(method="l2p", options={"pool_size": 3}))


class TestDualPrompt:
    def test_prefixes_have_their_shapes_and_blocks(self, tiny) -> None:
        layers = {"g_prompt_layers": 2, "e_prompt_layers": 3}
        net = PrefixPrompts(tiny, pool_size=10, prompt_length=5, **layers)
        assert net.added["dualprompt.general"].shape == (2, 2, 5, 128)
        assert net.added["dualprompt.expert"].shape == (10, 2, 2, 5, 128)  # tiny has four blocks
        assert (list(net.g_blocks), list(net.e_blocks)) == ([0, 1], [2, 3])
        assert net.encode_image(torch.rand(3, 3, 32, 32)).shape == (3, tiny.embed_dim)

    def test_a_tower_without_a_block_for_e_prompts_is_a_warning(self, tiny) -> None:
        method = DualPrompt(g_prompt_layers=4)
        with pytest.warns(UserWarning, match="no E-prompts: g_prompt_layers is 4, .* 4 blocks"):
            method.wrap_backbone(tiny, seed=0)

    def test_a_prefix_of_minus_infinity_is_no_prefix(self, tiny) -> None:
        """Keys that get no attention change nothing: the block is the library's own."""
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
        normed = layer.layer_norm1(tokens)[0]
        q, k, v = (
            attention.q_proj(normed),
            torch.cat([prefix[0, 0], attention.k_proj(normed)]),
            torch.cat([prefix[1, 0], attention.v_proj(normed)]),
        )
        size, parts = attention.head_dim, []
        for head in range(128 // size):
            cut = slice(head * size, (head + 1) * size)
            share = (q[:, cut] @ k[:, cut].T / size**0.5).softmax(dim=1)  # [3, 2 + 3]
            parts.append(share @ v[:, cut])
        middle = tokens[0] + attention.out_proj(torch.cat(parts, dim=1))
        by_hand = middle + layer.mlp(layer.layer_norm2(middle))
        block = describe_block(layer)
        every = Tokens(tokens, read_at=torch.tensor([1]))
        torch.testing.assert_close(apply_block(block, every, prefix, False).rows[0], by_hand)
        ended = apply_block(block, every, prefix, True).rows[0]  # only what is read goes on
        torch.testing.assert_close(ended, by_hand[1:2])

    def test_a_session_trains_its_own_e_prompts_from_the_previous_ones(
        self, train_sessions
    ) -> None:
        learner, scenario = train_sessions("dualprompt", 1)
        sets = learner.student.backbone.weights()["dualprompt.expert"]
        first = sets.detach().clone()
        steps = learner.training_steps(scenario.session(1))
        next(steps)
        assert torch.equal(sets[0], first[0])
        assert torch.equal(sets[2:], first[2:])
        distance = (sets[1] - first[0]).abs().max()  # one step of AdamW
        assert 0 < distance < 2 * learner.student.lr + 0.2 * learner.student.lr
        assert learner.method.sessions.training
        for _ in steps:
            pass
        assert not learner.method.sessions.training
        assert learner.method.sessions.count == 2

    def test_after_training_the_nearest_key_selects(self, train_sessions, tiny) -> None:
        learner, scenario = train_sessions("dualprompt", 2)
        net = find_wrapper(learner.student.backbone, PrefixPrompts)
        pixels = scenario.tasks[0].test.read(range(4))
        cosines = tiny.encode_image(pixels) @ normalize(net.added[net.keys], dim=1)[:2].T
        net.encode_image(pixels)
        torch.testing.assert_close(net.key_similarity, cosines.max(dim=1).values)

    def test_more_sessions_than_prompts_are_an_error(self, train_sessions) -> None:
        learner, scenario = train_sessions("dualprompt", 1, options={"pool_size": 1})
        before = learner.digest()
        with pytest.raises(InputError, match="prompts for 1 sessions and this is number 2"):
            learner.learn(scenario.session(1))
        assert learner.digest() == before


class TestSLCA:
    def test_samples_from_the_gaussian_of_each_class_with_older_means_shrunk(self) -> None:
        generator = torch.Generator().manual_seed(0)
        mixing = tensor([[2.0, 0.0], [1.0, 0.5]])
        features = torch.randn(4000, 2, generator=generator) @ mixing.T + tensor([10.0, -5.0])
        gaussians = ClassGaussians()
        gaussians.fit(0, features, 1)
        gaussians.fit(1, features * 0 + tensor([3.0, 3.0]), 2)
        samples, labels = gaussians.sample(8000, 2, generator)
        old, new = samples[labels == 0], samples[labels == 1]
        assert abs(len(old) - len(new)) < 400
        torch.testing.assert_close(old.mean(0), tensor([10.0, -5.0]) * 0.95, atol=0.15, rtol=0)
        expected = mixing @ mixing.T
        torch.testing.assert_close(old.T.cov(), expected, atol=0.3, rtol=0)
        torch.testing.assert_close(new.mean(0), tensor([3.0, 3.0]), atol=0.01, rtol=0)
        assert new.std(0).max() == pytest.approx(RIDGE**0.5, rel=0.1)  # one point, and the ridge

    def test_projections_learn_faster_than_the_rest(self, train_sessions, tiny) -> None:
        before = {n: w.detach().clone() for n, w in tiny.weights().items()}
        learner, _ = train_sessions("slca", 0.5)
        after, lr = learner.student.backbone.weights(), learner.student.lr
        # The first step of AdamW changes an entry by the learning rate, and a little by its decay.
        steps = {n: ((after[n] - w).abs().max() / lr).item() for n, w in before.items()}
        fast = set(tiny.projection_weights())
        assert len(fast) == 2
        assert all(4.5 < steps[n] < 5.5 for n in fast)
        assert all(step < 2.5 for n, step in steps.items() if n not in fast)

    def test_after_the_first_session_the_projections_alone_are_aligned(
        self, train_sessions
    ) -> None:
        learner, scenario = train_sessions("slca", 1)
        names, totals = [], set()
        for step in learner.training_steps(scenario.session(1)):
            names.append(learner.student.selection.names)
            totals.add(step.total)
        # Two epochs of three batches, then three of as many steps as there are classes.
        assert {len(names)} == totals == {2 * 3 + 3 * 6}
        assert {len(selected) for selected in names[6:]} == {2}
        assert len(names[5]) > 100

    def test_the_alignment_normalises_by_the_norms_of_each_sessions_logits(
        self, train_sessions
    ) -> None:
        learner, scenario = train_sessions("slca", 1)
        student, method = learner.student, learner.method
        for step in learner.training_steps(scenario.session(1)):
            if step.number == 7:
                break
        features, labels = method.gaussians.sample(256, 2, student.rng("alignment", 3))
        logits = student.backbone.project_image(features) @ student.encode_captions().T
        first, second = logits[:, :3].norm(dim=1), logits[:, 3:].norm(dim=1)
        scaled = logits / ((first + second) / 2)[:, None] / 0.1
        by_hand = torch.nn.functional.cross_entropy(scaled, labels)
        torch.testing.assert_close(method.alignment_loss(student, None, 3), by_hand)

    def test_a_class_without_images_is_an_error(self, train_sessions) -> None:
        learner, scenario = train_sessions("slca", 0)
        full = scenario.session(0)
        prompts = {**full.prompts, "nothing": full.prompts[full.classes[0]]}
        empty = replace(full, classes=(*full.classes, "nothing"), prompts=prompts)
        with pytest.raises(InputError, match="'nothing' has no training images, so slca"):
            learner.learn(empty)


class TestSparCL:
    def test_a_mask_grows_at_random_to_its_density(self) -> None:
        mask = torch.zeros(10, 10, dtype=torch.bool)
        mask[0, :4] = True
        full = grow_mask(mask, 0.05, torch.Generator().manual_seed(0))
        assert int(full.sum()) == 5
        assert full[mask].all()
        other = grow_mask(mask, 0.05, torch.Generator().manual_seed(1))
        assert not torch.equal(full, other)

    def test_importance_is_the_weight_and_half_the_gradient(self, train_sessions) -> None:
        learner, scenario = train_sessions("sparcl", 0.5, options={"retained_density": 0.05})
        student, method, batch = learner.student, learner.method, first_batch(scenario)
        name, weight = next(iter(student.backbone.linear_weights().items()))
        mask = method.compute_mask(student, 0, method.importance(student, [batch]))[name]
        loss = student.clip_loss(batch.pixels, batch.labels)
        (grad,) = torch.autograd.grad(loss, weight)
        importance = (weight.abs() + 0.5 * grad.abs()).flatten()
        top = importance.topk(int(0.05 * weight.numel())).indices
        assert mask.flatten()[top].all()
        assert int(mask.sum()) == len(top)

    def test_only_five_per_cent_of_every_linear_layer_changes(self, train_sessions, tiny) -> None:
        before = {n: w.detach().clone() for n, w in tiny.weights().items()}
        learner, _ = train_sessions("sparcl", 1)
        for name, weight in learner.student.backbone.weights().items():
            changed = int((weight != before[name]).sum())
            allowed = int(0.05 * weight.numel()) if name in tiny.linear_weights() else 0
            assert changed <= allowed
            assert bool(changed) == bool(allowed)

    def test_a_new_mask_keeps_the_moments_of_entries_that_stay(self, train_sessions) -> None:
        learner, scenario = train_sessions("sparcl", 0, epochs=2, options={"mask_interval": 1})
        steps = learner.training_steps(scenario.session(0))
        for _ in range(3):
            next(steps)
        student, method = learner.student, learner.method
        name = next(iter(student.selection.names))

        def mask_and_moments():
            mask = student.selection.mask[name]
            dense = torch.zeros(mask.shape)
            dense[mask] = student.optimizer_state()[f"{name}/exp_avg_sq"]
            return mask, dense

        old, moments = mask_and_moments()
        importance = method.importance(student, [first_batch(scenario)])
        student.change_mask(method.compute_mask(student, 1, importance))
        new, kept = mask_and_moments()
        stayed = old & new
        assert stayed.any()
        assert (new & ~old).any()
        assert torch.equal(kept[stayed], moments[stayed])
        assert not kept[new & ~old].any()
        assert student.session_selection is student.selection  # the stream uses the newest


def first_batch(scenario) -> Batch:
    train = scenario.session(0).train
    return Batch(train.read(range(8)), tensor(train.labels[:8]), None)


class TestSPU:
    def test_scores_by_the_clip_loss_or_by_the_output_norm(self, train_sessions) -> None:
        learner, scenario = train_sessions("spu", 1)
        student, batch = learner.student, first_batch(scenario)
        images, texts = student.encode_pairs(batch.pixels, batch.labels)
        rows = (student.backbone.logit_scale * images @ texts.T).tolist()
        by_hand = sum(sum(x * x for x in row) for row in rows) / len(rows)
        assert ReleasedSPU().scoring_loss(student, batch).item() == pytest.approx(by_hand, rel=1e-4)
        clip = student.clip_loss(batch.pixels, batch.labels)
        assert SPU().scoring_loss(student, batch).item() == pytest.approx(clip.item())

    def test_the_released_variant_is_spu_with_other_settings(self) -> None:
        spu = SPU(output_norm=True, score_on_quarter=True, extra_weights="biases and projection")
        assert ReleasedSPU().hyperparameters() == spu.hyperparameters()

    def test_scores_can_be_computed_on_a_quarter_of_the_batches(self, train_sessions) -> None:
        learner, scenario = train_sessions("spu", 1)
        scored = []

        class Counting(SPU):
            def scoring_loss(self, student, batch):
                scored.append(batch)
                return super().scoring_loss(student, batch)

        batches = [first_batch(scenario)] * 8
        Counting(score_on_quarter=True).select_parameters(learner.student, batches)
        assert len(scored) == 2
        Counting().select_parameters(learner.student, batches)
        assert len(scored) == 2 + 8


def test_cross_entropy_to_a_distribution_by_hand() -> None:
    logits, target = tensor([[1.0, 0.0]]), tensor([[0.3, 0.7]])
    p = torch.softmax(logits, 1)[0]
    by_hand = -(0.3 * p[0].log() + 0.7 * p[1].log())
    assert soft_cross_entropy(logits, target).item() == pytest.approx(by_hand.item())


def test_an_empty_replay_buffer_stores_nothing_and_a_negative_one_is_an_error(small, tiny) -> None:
    learner, _ = train_learner(small(method="flyp", buffer_size=0), tiny, 1)
    assert len(learner.replay_buffer) == 0
    with pytest.raises(InputError, match="buffer_size is -1"):
        small(method="flyp", buffer_size=-1)
    with pytest.raises(InputError, match="buffer of 1 images cannot keep one of each of 2"):
        plan(small(method="flyp", buffer_size=1))
