"""The scikit-learn classifier: scikit-learn's own checks, new classes, pipelines, bad input."""

import warnings

import numpy as np
import pytest
from sklearn.model_selection import GridSearchCV, cross_val_score
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import FunctionTransformer
from sklearn.utils.estimator_checks import check_estimator

from dosapp.data.preprocess import to_bytes
from dosapp.errors import InputError
from dosapp.experiments.plan import build_scenario
from dosapp.settings import RunSettings
from dosapp.sklearn import DosappClassifier

FEW_COLUMNS = "the check's tables have 1 to 10 columns of any numbers; rows of images have more"
# Checks that fit a table of arbitrary numbers; `DrawnTables` runs them on images of such tables.
NO_IMAGES = dict.fromkeys(
    (
        "check_classifier_data_not_an_array",
        "check_classifiers_classes",
        "check_classifiers_one_label",
        "check_classifiers_train",
        "check_dict_unchanged",
        "check_dont_overwrite_parameters",
        "check_dtype_object",
        "check_estimators_dtypes",
        "check_estimators_fit_returns_self",
        "check_estimators_nan_inf",
        "check_estimators_overwrite_params",
        "check_estimators_partial_fit_n_features",
        "check_estimators_pickle",
        "check_f_contiguous_array_estimator",
        "check_fit2d_1feature",
        "check_fit2d_1sample",
        "check_fit2d_predict1d",
        "check_fit_check_is_fitted",
        "check_fit_idempotent",
        "check_fit_score_takes_y",
        "check_methods_sample_order_invariance",
        "check_methods_subset_invariance",
        "check_n_features_in",
        "check_n_features_in_after_fitting",
        "check_pipeline_consistency",
        "check_positive_only_tag_during_fit",
        "check_readonly_memmap_input",
        "check_supervised_y_2d",
    ),
    FEW_COLUMNS,
)
NOT_EXACT = {
    "check_classifiers_train": "one epoch on stripes does not reach 83 % accuracy",
    "check_methods_subset_invariance": "float32 sums differ in the seventh digit with the batch",
}


class DrawnTables(DosappClassifier):
    """Draws each row of a table as stripes, so that the checks on tables fit images."""

    def _unflatten(self, X: np.ndarray) -> np.ndarray:
        values = (127.5 * (1 + np.tanh(np.asarray(X, dtype=float)))).astype(np.uint8)
        stripes = np.resize(values.T, (32, len(X))).T
        return np.repeat(np.repeat(stripes[:, None, :, None], 32, axis=1), 3, axis=3)


def run_checks(estimator: DosappClassifier, expected: dict[str, str]) -> list[str]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # sessions of few images
        results = check_estimator(
            estimator, expected_failed_checks=expected, on_skip=None, on_fail=None
        )
    failed = [(r["check_name"], r["exception"]) for r in results if r["status"] == "failed"]
    assert not failed
    unneeded = set(expected) - {r["check_name"] for r in results if r["status"] == "xfail"}
    assert not unneeded  # every reason is one that a check fails for
    return [r["check_name"] for r in results if r["status"] == "passed"]


def test_checks_that_need_no_images_pass() -> None:
    assert len(run_checks(DosappClassifier(), NO_IMAGES)) >= 20


@pytest.mark.slow
def test_checks_on_tables_pass_with_tables_drawn_as_images() -> None:
    assert len(run_checks(DrawnTables(method="flyp", epochs=1), NOT_EXACT)) >= 49


@pytest.fixture(scope="module")
def photos() -> tuple[np.ndarray, np.ndarray]:
    """24 images of four classes of the embedded benchmark, `[n, H, W, 3]`, and their names."""
    from dosapp.backbones.registry import load_backbone

    settings = RunSettings(classes=4, tasks=2, train_images=6, test_images=2)
    tasks = build_scenario(settings, load_backbone("tiny").preprocess).tasks
    pixels = [to_bytes(task.train.read(range(len(task.train)))) for task in tasks]
    X = [images.permute(0, 2, 3, 1).numpy() for images in pixels]
    y = [np.array(task.classes)[task.train.labels] for task in tasks]
    return np.concatenate(X), np.concatenate(y)


SMALL = {"method": "dosapp", "epochs": 2, "batch_size": 6}


def test_new_classes_come_session_by_session(photos) -> None:
    X, y = photos
    model = DosappClassifier(**SMALL).partial_fit(X[:12], y[:12])
    assert len(model.classes_) == 2
    model.adapt(X[:12])
    model.partial_fit(X[12:], y[12:])
    assert list(model.classes_) == sorted(set(y))
    probabilities = model.predict_proba(X)
    assert probabilities.shape == (24, 4)
    np.testing.assert_allclose(probabilities.sum(axis=1), 1)
    assert (model.predict(X) == model.classes_[probabilities.argmax(axis=1)]).all()
    predicted = [p.label for p in model.learner_.predict([*map(to_image, X[:3])])]
    assert list(model.predict(X[:3])) == predicted
    assert model.score(X, y) > 0.5
    assert model.learner_.sessions == 2


def to_image(array: np.ndarray) -> object:
    from PIL import Image

    return Image.fromarray(array)


def test_it_works_in_pipelines_and_searches(photos) -> None:
    X, y = photos
    X, y = X[:12], y[:12]
    numbers = np.unique(y, return_inverse=True)[1]
    names = dict(enumerate(np.unique(y)))
    model = DosappClassifier(
        method="zero-shot", class_names=names, image_shape=(32, 32, 3), batch_size=6
    )
    flat = X.reshape(len(X), -1) / 255  # floats, flattened, as scikit-learn's datasets of faces
    assert cross_val_score(model, flat, numbers, cv=2).mean() > 0.5
    search = GridSearchCV(model, {"template": ["a photo of a {}.", "{}"]}, cv=2).fit(X, numbers)
    assert set(search.best_params_) == {"template"}
    assert search.predict(X).dtype == numbers.dtype
    flip = make_pipeline(FunctionTransformer(lambda images: images[:, :, ::-1]), model)
    assert flip.fit(X, numbers).score(X, numbers) > 0.5


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda X: X[..., 0], r"X has shape \[4, 32, 32\]; give images \[n, H, W, 3\]"),
        (lambda X: X.astype(float) * 2, "values from 0 to 510; give uint8, or floats from 0 to 1"),
        (lambda X: X.reshape(4, -1), "give images .*, or image_shape"),
        (lambda X: ["a.jpg"] * 4, "X has paths; give images .* or use Learner.learn"),
        (lambda X: X[:3], "inconsistent numbers of samples"),
    ],
)
def test_what_is_no_image_is_one_sentence(change, message) -> None:
    X = np.zeros((4, 32, 32, 3), dtype=np.uint8)
    X[0] = 255
    with pytest.raises(ValueError, match=message):
        DosappClassifier(epochs=1).fit(change(X), ["a", "b", "a", "b"])


def test_wrong_parameters_and_labels_are_one_sentence(photos) -> None:
    X, y = photos
    with pytest.raises(InputError, match="did you mean 'dosapp'"):
        DosappClassifier(method="dosap").fit(X, y)
    with pytest.raises(InputError, match="class_names has no name for the label"):
        DosappClassifier(class_names={"x": "y"}, method="zero-shot").fit(X, y)
    with pytest.raises(InputError, match="which is not in classes"):
        DosappClassifier(method="zero-shot").partial_fit(X, y, classes=["x"])


def test_labels_that_are_numbers_are_named_in_a_warning(photos) -> None:
    X, _ = photos
    with pytest.warns(
        UserWarning, match=r"labels are numbers \(1, …\), which mean nothing to CLIP"
    ):
        DosappClassifier(method="zero-shot").fit(X[:2], [1, 2])
