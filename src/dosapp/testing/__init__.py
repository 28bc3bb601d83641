"""Checks that other packages can run on their own methods."""

from dosapp.testing.method_checks import METHOD_CHECKS, check_method

__all__ = ["METHOD_CHECKS", "check_method"]
