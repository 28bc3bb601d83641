"""Counts with their nouns, for messages."""


def plural(count: int, noun: str) -> str:
    """A count and its noun.

    Example:
        >>> plural(1, "run"), plural(45, "run"), plural(2, "class")
        ('1 run', '45 runs', '2 classes')
    """
    ending = "" if count == 1 else "es" if noun.endswith("s") else "s"
    return f"{count:,} {noun}{ending}"
