"""The message for a package that belongs to an optional extra and is not installed."""

from dosapp.errors import InputError


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
