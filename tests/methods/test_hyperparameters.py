"""Hyper-parameters by today's names and by those of version 0.1."""

import pytest

from dosapp.errors import InputError
from dosapp.methods.registry import METHODS, build_method

# What version 0.1 wrote into the keys of results: every hyper-parameter with its default.
DEFAULTS = {
    "zero-shot": {},
    "flyp": {},
    "lwf": {"weight": 0.01, "temperature": 5.0},
    "prd": {"weight": 0.1, "temperature": 1.0},
    "mas": {"strength": 0.1, "keep": 0.5},
    "zscl": {"references": "", "weight": 1.0, "temperature": 2.0, "look": 64, "every": 10},
    "l2p": {"pool": 10, "length": 5, "pull": 0.1, "take": 5, "together": False},
    "dualprompt": {"pool": 10, "length": 5, "pull": 1.0, "general": 2, "expert": 3},
    "slca": {"fast": 5.0, "passes": 3, "samples": 256, "temperature": 0.1},
    "sparcl": {"density": 0.05, "kept": 0.04, "every": 5, "gradient": 0.5},
    "spu": {
        "sparsity": 0.1,
        "weights": "first_mlp",
        "scope": "tensor",
        "output_norm": False,
        "quarter": False,
        "beside": "nothing",
    },
    "spu-released": {
        "sparsity": 0.1,
        "weights": "first_mlp",
        "scope": "tensor",
        "output_norm": True,
        "quarter": True,
        "beside": "biases and projection",
    },
    "dosapp": {
        "learner.sparsity": 0.1,
        "learner.weights": "first_mlp",
        "learner.scope": "tensor",
        "learner.output_norm": False,
        "learner.quarter": False,
        "learner.beside": "nothing",
        "smoothing.gamma": 0.8,
        "smoothing.lam": 0.9,
        "smoothing.delta": 0.9999,
        "smoothing.interval": "step",
        "stream_mask": "union",
        "combine": "max",
        "labels": "surer",
    },
    "joint": {},
    "self-training": {},
    "tent": {},
    "eata": {"margin": 0.4, "likeness": 0.1, "pull": 1.0, "memory": 0.9},
    "note": {"capacity": 64},
    "ecotta": {"parts": 5, "bottleneck": 16, "stay": 0.25, "margin": 0.4, "warmup": 1},
    "cotta": {"momentum": 0.999, "restore": 0.01, "unsure": 0.72, "views": 32},
    "rmt": {"momentum": 0.999, "agree": 1.0, "contrast": 1.0, "temperature": 0.1},
    "psmt": {"momentum": 0.999, "pull": 500.0, "restore": 0.03},
    "dss-style": {"momentum": 0.999, "memory": 0.9},
    # later methods
    "lora": {"r": 8, "lora_alpha": 8.0, "target_modules": ("q_proj", "v_proj")},
    "tda": {
        "pos_shot_capacity": 3,
        "pos_alpha": 2.0,
        "pos_beta": 5.0,
        "neg_shot_capacity": 2,
        "neg_alpha": 0.117,
        "neg_beta": 1.0,
        "entropy_threshold_lower": 0.2,
        "entropy_threshold_upper": 0.5,
        "mask_threshold_lower": 0.03,
        "mask_threshold_upper": 1.0,
    },
    "oga": {"shot_capacity": 8, "tau": 0.05},
}
DEFAULTS["stream-gda"] = DEFAULTS["dosapp"] | {"labels": "teacher"}
DEFAULTS["stream-gda-ensemble"] = DEFAULTS["stream-gda"]
# Method, today's name, name of version 0.1, and a value that is not the default.
RENAMED = [
    ("lwf", "distillation_weight", "weight", 0.5),
    ("prd", "distillation_weight", "weight", 0.5),
    ("mas", "reg_lambda", "strength", 3.0),
    ("mas", "alpha", "keep", 0.25),
    ("zscl", "ref_dataset", "references", "signs"),
    ("zscl", "distillation_weight", "weight", 0.5),
    ("zscl", "ref_batch_size", "look", 8),
    ("zscl", "avg_freq", "every", 3),
    ("l2p", "pool_size", "pool", 12),
    ("l2p", "prompt_length", "length", 3),
    ("l2p", "pull_constraint_coeff", "pull", 0.5),
    ("l2p", "top_k", "take", 2),
    ("l2p", "batchwise_prompt", "together", True),
    ("dualprompt", "pool_size", "pool", 20),
    ("dualprompt", "prompt_length", "length", 3),
    ("dualprompt", "pull_constraint_coeff", "pull", 0.5),
    ("dualprompt", "g_prompt_layers", "general", 1),
    ("dualprompt", "e_prompt_layers", "expert", 1),
    ("slca", "classifier_lr_scale", "fast", 2.0),
    ("slca", "ca_epochs", "passes", 1),
    ("slca", "samples_per_step", "samples", 32),
    ("slca", "ca_temperature", "temperature", 0.5),
    ("sparcl", "retained_density", "kept", 0.02),
    ("sparcl", "mask_interval", "every", 2),
    ("sparcl", "gradient_weight", "gradient", 1.0),
    ("spu", "candidates", "weights", "all"),
    ("spu", "score_on_quarter", "quarter", True),
    ("spu", "extra_weights", "beside", "biases and projection"),
    ("spu-released", "candidates", "weights", "all"),
    ("spu-released", "score_on_quarter", "quarter", False),
    ("spu-released", "extra_weights", "beside", "nothing"),
    ("dosapp", "selection.sparsity", "learner.sparsity", 0.3),
    ("dosapp", "selection.candidates", "learner.weights", "all"),
    ("dosapp", "candidates", "weights", "all"),
    ("dosapp", "selection.scope", "learner.scope", "global"),
    ("dosapp", "selection.output_norm", "learner.output_norm", True),
    ("dosapp", "selection.score_on_quarter", "learner.quarter", True),
    ("dosapp", "selection.extra_weights", "learner.beside", "biases and projection"),
    ("dosapp", "ema.gamma", "smoothing.gamma", 0.5),
    ("dosapp", "ema.lam", "smoothing.lam", 0.95),
    ("dosapp", "ema.delta", "smoothing.delta", 0.999),
    ("dosapp", "ema.interval", "smoothing.interval", "epoch"),
    ("dosapp", "merge", "combine", "sum"),
    ("dosapp", "pseudo_labels", "labels", "student"),
    ("eata", "e_margin", "margin", 0.5),
    ("eata", "d_margin", "likeness", 0.2),
    ("eata", "fisher_alpha", "pull", 2000.0),
    ("eata", "decay", "memory", 0.5),
    ("note", "memory_size", "capacity", 8),
    ("ecotta", "num_partitions", "parts", 4),
    ("ecotta", "lambda_reg", "stay", 0.5),
    ("ecotta", "e_margin", "margin", 0.5),
    ("ecotta", "warmup_epochs", "warmup", 2),
    ("cotta", "restore_prob", "restore", 0.1),
    ("cotta", "ap", "unsure", 0.9),
    ("cotta", "num_augmentations", "views", 4),
    ("rmt", "lambda_ce_trg", "agree", 0.5),
    ("rmt", "lambda_cont", "contrast", 0.5),
    ("psmt", "fisher_alpha", "pull", 5.0),
    ("psmt", "restore_ratio", "restore", 0.1),
    ("dss-style", "decay", "memory", 0.5),
]
RENAMED += [
    (name, *row[1:])
    for name in ("stream-gda", "stream-gda-ensemble")
    for row in RENAMED
    if row[0] == "dosapp"
]


def build(name: str, options: dict[str, object]):
    """The method; an unlabelled one after SPU."""
    if METHODS[name].phase != "unlabelled":
        return build_method(name, options=options)
    return build_method("spu", name, {f"unlabelled.{key}": v for key, v in options.items()})


@pytest.mark.parametrize("name", METHODS)
def test_keys_have_the_names_and_values_of_version_0_1(name) -> None:
    method = METHODS[name]()
    assert method.key_hyperparameters() == DEFAULTS[name]
    assert len(method.hyperparameters()) == len(DEFAULTS[name])


@pytest.mark.parametrize(("name", "today", "old", "value"), RENAMED)
class TestRenamed:
    def test_both_names_build_the_same_method(self, name, today, old, value) -> None:
        by_name, by_old_name = build(name, {today: value}), build(name, {old: value})
        assert by_name.hyperparameters() == by_old_name.hyperparameters()
        assert by_name.hyperparameters() != build(name, {}).hyperparameters()

    def test_both_names_give_the_same_key(self, name, today, old, value) -> None:
        by_name, by_old_name = build(name, {today: value}), build(name, {old: value})
        assert by_name.key_hyperparameters() == by_old_name.key_hyperparameters()
        expected = {path: value for path in DEFAULTS[name] if f".{path}".endswith(f".{old}")}
        assert len(expected) == 1
        half = "unlabelled." if METHODS[name].phase == "unlabelled" else ""
        keys = {f"{half}{path}": value for path, value in (DEFAULTS[name] | expected).items()}
        assert keys.items() <= by_name.key_hyperparameters().items()


def test_every_renamed_hyperparameter_is_tested() -> None:
    tested = {(name, today, old) for name, today, old, _ in RENAMED}
    for name, method in METHODS.items():
        default = method()
        paths = zip(default.hyperparameters(), default.key_hyperparameters(), strict=True)
        assert {(name, today, old) for today, old in paths if today != old} <= tested


def test_values_of_version_0_1_are_accepted_and_stay_in_the_key() -> None:
    by_old_name = build_method("dosapp", options={"labels": "surer"})
    assert by_old_name == build_method("dosapp", options={"pseudo_labels": "max-logit"})
    assert by_old_name.pseudo_labels == "max-logit"
    assert by_old_name.key_hyperparameters()["labels"] == "surer"
    after_flyp = build_method("flyp", "dosapp", {"labels": "surer"})
    assert after_flyp.key_hyperparameters()["unlabelled.labels"] == "surer"


def test_a_name_of_both_halves_goes_to_both_also_in_version_0_1() -> None:
    pair = build_method("l2p", "eata", {"pull": 0.3})
    assert (pair.labelled.pull_constraint_coeff, pair.unlabelled.fisher_alpha) == (0.3, 0.3)
    pair = build_method("l2p", "eata", {"labelled.pull": 0.3, "unlabelled.pull": 2})
    assert (pair.labelled.pull_constraint_coeff, pair.unlabelled.fisher_alpha) == (0.3, 2)


@pytest.mark.parametrize(
    ("name", "option", "hint"),
    [
        ("eata", "e_margn", "did you mean 'e_margin'"),
        ("l2p", "pool_sise", "did you mean 'pool_size'"),
        ("dosapp", "selection.weight", "dosapp methods dosapp"),
    ],
)
def test_an_unknown_name_is_one_sentence(name, option, hint) -> None:
    with pytest.raises(InputError, match=f"unknown setting '.*{option}'") as error:
        build(name, {option: 1})
    assert hint in str(error.value)
    assert "\n" not in str(error.value)


def test_a_hyperparameter_under_both_names_is_one_sentence() -> None:
    with pytest.raises(InputError, match="top_k is given twice"):
        build_method("l2p", options={"top_k": 3, "take": 4})
