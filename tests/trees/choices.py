"""Choices of a tree where steps cost what a test says."""

from hf_drafthead.generation.settings import DraftPlan, DraftSettings
from hf_drafthead.trees.choice import without_entry
from hf_drafthead.trees.costs import NodeCosts
from tests.bases import VOCABULARY


class Costs:
    """Every tree costs as much, or what is said of about as many nodes; None: it cannot be measured."""

    def __init__(self, cost):
        self.cost = cost

    def __call__(self, trees):
        if self.cost is None:
            return None
        known = self.cost if isinstance(self.cost, dict) else {2: self.cost}
        return NodeCosts({size: known[min(known, key=lambda nodes: abs(nodes - size.nodes))] for size in trees})

    def in_words(self, size):
        return ""

    def contradict(self, longer):
        pass

    def doubt(self):
        pass


ONE = Costs(1.0)


def planned(key, costs=ONE, depth=None, vocabulary=VOCABULARY, **settings) -> DraftPlan:
    """The plan of a call that names no tree, and for which nothing was calibrated."""
    return without_entry(DraftSettings(**settings), key, (depth, vocabulary), costs)
