"""A scikit-learn classifier of images; needs the extra 'sklearn'.

`fit` trains one session from scratch. `partial_fit` trains a further session, which may bring new
classes. `adapt` takes steps on unlabelled images.
"""

import tempfile
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from dosapp.errors import InputError
from dosapp.learner.learner import Learner
from dosapp.runtime.extras import missing_extra
from dosapp.runtime.files import write_bytes
from dosapp.settings import LearnerSettings

try:
    from sklearn.base import BaseEstimator, ClassifierMixin
    from sklearn.utils import check_random_state
    from sklearn.utils.multiclass import check_classification_targets
    from sklearn.utils.validation import check_array, check_is_fitted, check_X_y, validate_data
except ImportError as missing:
    raise missing_extra("the scikit-learn classifier", "sklearn", missing) from missing

PREDICTION_BATCH = 256
Array = NDArray[Any]


class InvalidImagesError(InputError, ValueError):
    """Data that are no images; scikit-learn expects a `ValueError`."""


class DosappClassifier(ClassifierMixin, BaseEstimator):
    """A CLIP classifier that learns new classes over time, as a scikit-learn estimator.

    X is `[n, H, W, 3]`, uint8 or floats in [0, 1]; or a table of flattened images of `image_shape`.

    Args:
        method: Method of the labelled phase: `dosapp methods`.
        adapter: Method of the unlabelled phase, if another.
        backbone: `tiny`, `ViT-B-16`, a hub id, or a local folder.
        lr: Learning rate; the default of the learner if not given.
        epochs: Passes over the images of a session; likewise.
        batch_size: Labelled images per step; likewise.
        template: Caption of a class, `{}` is its name.
        buffer_size: Images in the replay buffer; 0 stores none.
        head: Predict by class statistics: `ncm`, `gda`, `ncm-moved` or `gda-moved`.
        options: Hyper-parameters of the method.
        class_names: The name of each label, for the captions; `str(label)` if not given.
        image_shape: `(H, W)` or `(H, W, 3)` of the rows of a table.
        device: `cpu`, `cuda`, `mps` or `auto`.
        random_state: Seed of the order of images.

    Attributes:
        classes_: The labels seen so far, sorted.
        learner_: The `Learner`, which can be saved, exported and served.

    Example:
        >>> X = np.zeros((8, 32, 32, 3), dtype=np.uint8)
        >>> X[:4, ..., 0], X[4:, ..., 2] = 220, 220
        >>> y = np.repeat(["red square", "blue square"], 4)
        >>> model = DosappClassifier(epochs=2, batch_size=4).fit(X, y)
        >>> str(model.predict(X[:1])[0]), model.score(X, y)
        ('red square', 1.0)
    """

    def __init__(
        self,
        *,
        method: str = "stream-gda-ensemble",
        adapter: str | None = None,
        backbone: str = "tiny",
        lr: float | None = None,
        epochs: int | None = None,
        batch_size: int | None = None,
        template: str = "",
        buffer_size: int = 0,
        head: str | None = None,
        options: Mapping[str, Any] | None = None,
        class_names: Mapping[Any, str] | None = None,
        image_shape: tuple[int, ...] | None = None,
        device: str = "cpu",
        random_state: Any = 0,
    ) -> None:
        self.method = method
        self.adapter = adapter
        self.backbone = backbone
        self.lr = lr
        self.epochs = epochs
        self.batch_size = batch_size
        self.template = template
        self.buffer_size = buffer_size
        self.head = head
        self.options = options
        self.class_names = class_names
        self.image_shape = image_shape
        self.device = device
        self.random_state = random_state

    def fit(self, X: Any, y: Any) -> Self:
        """Train a new learner on one session of all images.

        Args:
            X: Images.
            y: Their labels `[n]`.

        Returns:
            The estimator itself.

        Raises:
            ValueError: X holds no images, or y does not fit to it.
        """
        images, labels = self._check_labelled(X, y, reset=True)
        self.learner_ = Learner(self._settings())
        self.classes_ = np.unique(labels)
        self._learn(images, labels)
        return self

    def partial_fit(self, X: Any, y: Any, classes: Any = None) -> Self:
        """Train a further session: new classes, or more images of known ones.

        Args:
            X: Images.
            y: Their labels `[n]`.
            classes: Labels that will come, as for other estimators; they need not be given.

        Returns:
            The estimator itself.
        """
        is_first = not hasattr(self, "learner_")
        images, labels = self._check_labelled(X, y, reset=is_first)
        if classes is not None and len(unlisted := np.setdiff1d(labels, classes)):
            raise InvalidImagesError(f"y holds {unlisted[0]!r}, which is not in classes")
        if is_first:
            self.learner_ = Learner(self._settings())
            self.classes_ = np.unique(labels)
        self.classes_ = np.union1d(self.classes_, labels)
        self._learn(images, labels)
        return self

    def adapt(self, X: Any) -> Self:
        """Take steps on unlabelled images, each seen once; they are not stored.

        Args:
            X: Images.

        Returns:
            The estimator itself.
        """
        check_is_fitted(self)
        size = self.learner_.settings.batch_size
        self.learner_.adapt_stream(self._check_images(X), batch_size=size, progress=False)
        return self

    def predict_proba(self, X: Any) -> Array:
        """Probabilities `[n, classes]` in the order of `classes_`."""
        check_is_fitted(self)
        images, known = self._check_images(X), self.learner_.classes
        columns = {name: n for n, name in enumerate(map(self._class_name, self.classes_))}
        probabilities = np.zeros((len(images), len(self.classes_)))
        row = 0
        for batch in self._batches(images, PREDICTION_BATCH):
            for prediction in self.learner_.predict(batch, top=len(known)):
                for name, score in prediction.top:
                    probabilities[row, columns[name]] = score
                row += 1
        normalised: Array = probabilities / probabilities.sum(axis=1, keepdims=True)
        return normalised

    def predict(self, X: Any) -> Array:
        """The most probable label of each image `[n]`."""
        check_is_fitted(self)
        best: Array = self.classes_[self.predict_proba(X).argmax(axis=1)]
        return best

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.input_tags.three_d_array = False
        tags.classifier_tags.multi_label = False
        return tags

    # Pickling, as joblib does for parallel jobs: the learner as the files of its folder

    def __getstate__(self) -> dict[str, Any]:
        state: dict[str, Any] = dict(super().__getstate__())
        if "learner_" in state:
            with tempfile.TemporaryDirectory() as scratch:
                self.learner_.save(scratch)
                files = [path for path in Path(scratch).rglob("*") if path.is_file()]
                state["learner_"] = {
                    str(path.relative_to(scratch)): path.read_bytes() for path in files
                }
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        files = state.pop("learner_", None)
        super().__setstate__(state)
        if files is not None:
            with tempfile.TemporaryDirectory() as scratch:
                for name, data in files.items():
                    write_bytes(Path(scratch) / name, data)
                self.learner_ = Learner.load(scratch, device=self.device)

    # Learner

    def _settings(self) -> LearnerSettings:
        seed = self.random_state
        if not isinstance(seed, int | np.integer):
            seed = check_random_state(seed).randint(2**31 - 1)
        given = {
            "method": self.method,
            "adapt": self.adapter,
            "backbone": self.backbone,
            "lr": self.lr,
            "epochs": self.epochs,
            "batch_size": self.batch_size,
            "template": self.template,
            "buffer_size": self.buffer_size,
            "head": self.head,
            "options": dict(self.options or {}),
            "device": self.device,
            "seed": int(seed),
        }
        return LearnerSettings.parse({k: v for k, v in given.items() if v is not None})

    def _learn(self, images: Array, labels: Array) -> None:
        if self.class_names is None and np.asarray(labels).dtype.kind in "biuf":
            warnings.warn(
                f"labels are numbers ({labels[0]}, …), which mean nothing to CLIP; give their "
                "names as class_names",
                stacklevel=3,
            )
        by_name: dict[str, list[Image.Image]] = {}
        for image, label in zip(images, labels, strict=True):
            by_name.setdefault(self._class_name(label), []).append(Image.fromarray(image))
        self.learner_.learn(by_name, progress=False)  # as other estimators: silent

    def _class_name(self, label: Any) -> str:
        if self.class_names is None:
            return str(label)
        if label not in self.class_names:
            raise InvalidImagesError(f"class_names has no name for the label {label!r}; add it")
        return self.class_names[label]

    # Images

    def _check_labelled(self, X: Any, y: Any, reset: bool) -> tuple[Array, Array]:
        if y is None:
            raise InvalidImagesError(
                "this DosappClassifier estimator requires y to be passed, but the target y is None"
            )
        if isinstance(X, list | tuple) and any(isinstance(image, str | Path) for image in X):
            raise InvalidImagesError(
                "X has paths; give images [n, H, W, 3], or use Learner.learn, which reads files"
            )
        images, labels = check_X_y(X, y, dtype=None, allow_nd=True)
        check_classification_targets(labels)
        return self._to_bytes(images, X, reset), labels

    def _check_images(self, X: Any) -> Array:
        return self._to_bytes(check_array(X, dtype=None, allow_nd=True), X)

    def _to_bytes(self, X: Array, given: Any, reset: bool = False) -> Array:
        """Check images and turn them into `uint8 [n, H, W, 3]`.

        Args:
            X: The images as an array.
            given: As they were given: a table keeps the names of its features.
            reset: Whether a table may have another width than before; images always may.
        """
        if X.ndim == 2:
            validate_data(self, given, reset=reset, skip_check_array=True)
            X = self._unflatten(X)
        if X.ndim != 4 or X.shape[-1] != 3:
            raise InvalidImagesError(f"X has shape {list(X.shape)}; give images [n, H, W, 3]")
        if X.dtype == np.uint8:
            return X
        values = np.asarray(X, dtype=np.float64)
        limit = 1.0 if np.issubdtype(X.dtype, np.floating) else 255.0
        if values.min() < 0 or values.max() > limit:
            raise InvalidImagesError(
                f"X has values from {values.min():g} to {values.max():g}; give uint8, or floats "
                "from 0 to 1"
            )
        rounded: Array = np.round(values * (255.0 / limit)).astype(np.uint8)
        return rounded

    def _unflatten(self, X: Array) -> Array:
        shape = tuple(self.image_shape or ())
        if not shape:
            raise InvalidImagesError(
                f"X is a table of shape {list(X.shape)}; give images [n, H, W, 3], or image_shape"
            )
        if np.prod(shape) != X.shape[1]:
            raise InvalidImagesError(
                f"X has {X.shape[1]} features, but image_shape is {shape}; it must have as many"
            )
        images: Array = X.reshape(len(X), *shape)
        return np.repeat(images[..., None], 3, axis=-1) if len(shape) == 2 else images

    @staticmethod
    def _batches(images: Array, size: int) -> Iterator[list[Image.Image]]:
        for start in range(0, len(images), size):
            yield [Image.fromarray(image) for image in images[start : start + size]]
