"""Arithmetic without torch, to compare formulas with."""

import math


def softmax(values: list[float]) -> list[float]:
    powers = [math.exp(value) for value in values]
    return [power / sum(powers) for power in powers]
