"""Choices of a tree where steps cost what a test says."""

from hf_drafthead.generation.settings import DraftPlan, DraftSettings
from hf_drafthead.trees.choice import Choice
from tests.bases import VOCABULARY


class Costs:
    """Every tree costs as much; None: it cannot be measured."""

    def __init__(self, cost):
        self.cost = cost

    def __call__(self, trees, doubted=False):
        return None if self.cost is None else [self.cost] * len(trees)

    def in_words(self, trees):
        return ""


ONE = Costs(1.0)


def planned(key, costs=ONE, depth=None, vocabulary=VOCABULARY, **settings) -> DraftPlan:
    """The plan of a call that names no tree."""
    return Choice(DraftSettings(**settings), key, (depth, vocabulary), costs).plan()[0]
