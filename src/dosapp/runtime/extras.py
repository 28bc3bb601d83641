"""Packages of optional extras: checked before work begins, and named when they are missing."""

from importlib.util import find_spec

from dosapp.errors import InputError

PACKAGES = {  # extra → what is imported from it
    "report": ("matplotlib", "jinja2", "scipy"),
    "serve": ("fastapi", "fastapi_offline", "uvicorn", "python_multipart", "prometheus_client"),
    "onnx": ("onnx", "onnxscript"),
    "ray": ("ray",),
    "optuna": ("optuna",),
}


def check_extra(feature: str, extra: str) -> None:
    """Check that the packages of an extra are installed, without importing them.

    Args:
        feature: What needs the packages, as the subject of a sentence.
        extra: A key of `PACKAGES`.

    Raises:
        InputError: A package is not installed.

    Example:
        >>> check_extra("a report", "report")
    """
    for package in PACKAGES[extra]:
        if find_spec(package) is None:
            raise missing_extra(feature, extra, ImportError(name=package))


def missing_extra(feature: str, extra: str, error: ImportError | None = None) -> InputError:
    """Build the error for a feature whose packages are not installed.

    Args:
        feature: What needs the packages, as the subject of a sentence.
        extra: The extra of `pyproject.toml` that brings them; several with commas.
        error: The failed import, if there is one; it names the package.

    Returns:
        The error, to be raised by the caller.

    Example:
        >>> print(missing_extra("the client", "serve"))
        the client needs packages that are missing; in a clone: pip install -e '.[serve]'
    """
    package = error.name if error and error.name else "packages that are missing"
    return InputError(f"{feature} needs {package}; in a clone: pip install -e '.[{extra}]'")
