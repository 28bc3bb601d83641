"""Two methods as one: the first trains with labels, the second adapts to the stream."""

from dosapp.methods.base import Method
from dosapp.methods.method_pair import Pair


class TwoPhase(Pair):
    """A labelled and an unlabelled method.

    Hooks of the labelled phase also call the unlabelled method (its teacher follows, its prototypes
    are collected), but it neither selects the weights nor has a loss there.
    """

    phase = "both"

    def __init__(self, labelled: Method, unlabelled: Method) -> None:
        super().__init__(labelled, unlabelled, "unlabelled", adapter=unlabelled)
        self.unlabelled = unlabelled

    def __repr__(self) -> str:
        return f"{self.labelled!r}.then({self.unlabelled!r})"
