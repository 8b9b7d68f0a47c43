"""The walks against one written out token by token, on random trees, choices and ends."""

import math
import random
from collections.abc import Iterator
from types import SimpleNamespace
from typing import NamedTuple

import pytest
import torch
from transformers import GenerationConfig, LogitsProcessorList, StoppingCriteriaList
from transformers.generation.stopping_criteria import EosTokenCriteria, MaxLengthCriteria

from hf_drafthead.bases.topology import Topology
from hf_drafthead.generation import DraftTree
from hf_drafthead.generation.acceptance import (
    typical_choices,
    walk_greedily,
    walk_on_device,
    walk_on_host,
)
from hf_drafthead.generation.rules import Rules
from hf_drafthead.generation.state import Candidates, Limits, Rows, Walk

VOCABULARY, WIDTH, EOS = 7, 40, [1, 4]


class Case(NamedTuple):
    """A step of a few rows: trees, nodes' tokens, the base's choice at each, lengths, ends, and what limits them."""

    trees: list[DraftTree]
    tokens: list[list[int]]
    choice: list[list[int]]
    lengths: list[int]
    ends: list[int]
    reach: list[int]
    max_length: int

    @property
    def candidates(self) -> Candidates:
        alone = [tree.topology() for tree in self.trees]
        topology = alone[0] if len(set(self.trees)) == 1 else Topology(*map(torch.cat, zip(*alone)))
        return Candidates(torch.tensor(self.tokens), topology)


def random_tree(dice: random.Random, nodes: int, depth: int) -> DraftTree:
    """One of so many nodes, the root included, and exactly so deep."""
    paths = [(0,) * level for level in range(1, depth + 1)]
    while len(paths) < nodes - 1:
        parent = dice.choice([(), *paths])
        path = (*parent, sum(known[:-1] == parent for known in paths))
        if len(path) <= depth and path[-1] < VOCABULARY:
            paths.append(path)
    return DraftTree(paths)


def cases(count: int) -> Iterator[Case]:
    """Siblings differ, and every second child carries what the base chooses at its parent."""
    for seed in range(count):
        dice = random.Random(seed)
        rows, depth = dice.randint(1, 3), dice.randint(1, 4)
        nodes = depth + 1 + dice.randint(0, 6)
        trees = [random_tree(dice, nodes, depth)] * rows
        if dice.random() < 0.5:
            trees = [random_tree(dice, nodes, depth) for _ in range(rows)]
        tokens, choice = [], []
        for tree in trees:
            mine, chosen = [dice.randrange(VOCABULARY)], [dice.randrange(VOCABULARY) for _ in range(nodes)]
            guessed = {node: dice.sample(range(VOCABULARY), VOCABULARY) for node in range(nodes)}
            mine += [guessed[parent][path[-1]] for path, parent in zip(tree.paths, tree.parents[1:])]
            for node in range(nodes):
                children = tree.children(node)
                if children and dice.random() < 0.8:
                    chosen[node] = mine[dice.choice(children)]
            tokens.append(mine)
            choice.append(chosen)
        lengths = [dice.randint(2, 9) for _ in range(rows)]
        ends = [length - dice.randint(0, 1) if dice.random() < 0.2 else 0 for length in lengths]
        reach = [dice.choice([0, 1, 2, 9, 9, 9]) for _ in range(rows)]
        yield Case(trees, tokens, choice, lengths, ends, reach, max(lengths) + dice.choice([1, 2, 3, 20]))


def plain(case: Case, row: int) -> tuple[list[int], list[int], int]:
    """The nodes and tokens of a row, one after the other, and the length at which it ends, or 0."""
    if case.ends[row]:
        return [], [], case.ends[row]
    tree, at, nodes, emitted = case.trees[row], 0, [], []
    while True:
        nodes.append(at)
        emitted.append(case.choice[row][at])
        length = case.lengths[row] + len(emitted)
        if emitted[-1] in EOS or length == case.max_length:
            return nodes, emitted, length
        fitting = [child for child in tree.children(at) if case.tokens[row][child] == emitted[-1]]
        if not fitting or tree.depths[fitting[0]] > case.reach[row]:
            return nodes, emitted, 0
        at = fitting[0]


def assert_as_plain(walk, case: Case) -> None:
    for row in range(len(case.tokens)):
        nodes, emitted, end = plain(case, row)
        count = int(walk.counts[row])
        assert (walk.nodes[row, :count].tolist(), walk.tokens[row, :count].tolist()) == (nodes, emitted)
        assert int(walk.ends[row]) == end
        assert set(walk.tokens[row, count:].tolist()) <= {0} and int(walk.observed[row]) == count
    assert walk.nodes.shape == walk.tokens.shape and len(walk.nodes) == len(case.tokens)


def on_device(case: Case, valid: torch.Tensor):
    limits = Limits(
        max_length=torch.full((len(case.tokens),), case.max_length),
        eos=torch.tensor(EOS).expand(len(case.tokens), 1, -1),
        last_position=torch.full((len(case.tokens), 1), 99),
        padding=torch.tensor(0),
        pads=torch.tensor(True),
    )
    lengths, ends = torch.tensor(case.lengths), torch.tensor(case.ends)
    rows = Rows(torch.zeros(len(lengths), WIDTH), lengths, ends, torch.zeros(1), None, None, None)
    return walk_on_device(torch.tensor(case.choice), valid, case.candidates, rows, limits, torch.tensor(case.reach))


def root_alone(case: Case) -> Case:
    """The same step, with nothing drafted."""
    tokens, choice = ([row[:1] for row in lists] for lists in (case.tokens, case.choice))
    return case._replace(trees=[DraftTree([])] * len(tokens), tokens=tokens, choice=choice)


def test_the_walk_on_the_device_is_the_plain_one():
    for case in cases(150):
        for one in (case, root_alone(case)):
            assert_as_plain(on_device(one, torch.ones(len(one.tokens), len(one.tokens[0]), dtype=torch.bool)), one)


def test_a_walk_ends_before_a_node_without_numbers():
    for case in cases(40):
        for node in range(len(case.tokens[0])):
            valid = torch.ones(len(case.tokens), len(case.tokens[0]), dtype=torch.bool)
            valid[:, node] = False
            walk = on_device(case, valid)
            for row in range(len(case.tokens)):
                nodes, emitted, end = plain(case, row)
                if node in nodes:
                    emitted, end = emitted[: nodes.index(node)], 0
                assert walk.tokens[row, : int(walk.counts[row])].tolist() == emitted
                assert int(walk.ends[row]) == end and walk.valid[row]


def test_without_drafts_a_choice_counts_as_valid_where_there_are_numbers():
    for case in map(root_alone, cases(40)):
        walk = on_device(case, torch.zeros(len(case.tokens), 1, dtype=torch.bool))
        assert walk.valid.tolist() == [end > 0 for end in case.ends]
        assert_as_plain(walk, case)


def rules_of(case: Case, *more) -> Rules:
    config = GenerationConfig(eos_token_id=EOS)
    config._pad_token_tensor = torch.tensor(0)
    criteria = [MaxLengthCriteria(case.max_length), EosTokenCriteria(torch.tensor(EOS)), *more]
    return Rules(
        LogitsProcessorList(),
        StoppingCriteriaList(criteria),
        config,
        batch_size=len(case.tokens),
        prompt_length=1,
        device=torch.device("cpu"),
        samples=False,
    )


def state_of(case: Case, sequences: torch.Tensor | None = None) -> SimpleNamespace:
    """What the walks on the host look at of a call."""
    sequences = torch.full((len(case.tokens), WIDTH), 6) if sequences is None else sequences
    ends = [end or None for end in case.ends]
    return SimpleNamespace(
        rows=SimpleNamespace(sequences=sequences), lengths=case.lengths, ends=ends, reach=lambda: case.reach
    )


def on_host(case: Case, rules: Rules, sequences: torch.Tensor | None = None, depth: int | None = None, **more):
    logits = torch.nn.functional.one_hot(torch.tensor(case.choice), VOCABULARY).double()
    walks = walk_on_host(logits, case.candidates, state_of(case, sequences), rules, **more)
    return Walk.of_rows(walks, depth, rules.pad_token, logits.device)


def greedily(case: Case, depth: int | None = None):
    logits = torch.nn.functional.one_hot(torch.tensor(case.choice), VOCABULARY).double()
    walks = walk_greedily(logits, case.candidates, state_of(case), rules_of(case))
    return Walk.of_rows(walks, depth, 0, logits.device)


def test_a_walk_comes_back_from_one_tensor():
    for case in cases(20):
        walk = on_device(case, torch.ones(len(case.tokens), len(case.tokens[0]), dtype=torch.bool))
        parts = (walk.counts, walk.observed, walk.ends, walk.valid, walk.tokens, walk.nodes)
        assert torch.equal(Walk.of(*parts).packed, walk.packed) and walk.packed.shape[1] == 4 + 2 * walk.nodes.shape[1]
        rows = [
            (int(count), int(seen), int(end), *(part[: int(count)].tolist() for part in lists))
            for count, seen, end, *lists in zip(*parts[:3], *parts[4:])
        ]
        again = Walk.of_rows(rows, walk.nodes.shape[1], 0, torch.device("cpu"))
        assert torch.equal(again.tokens, walk.tokens) and torch.equal(again.packed[:, :4], walk.packed[:, :4])


@pytest.mark.parametrize("walked", [greedily, lambda case, *depth: on_host(case, rules_of(case), None, *depth)])
def test_the_walk_on_the_host_is_the_plain_one(walked):
    for case in cases(150):
        if len(case.tokens) > 1 or not case.ends[0]:  # a single row that has ended takes no step
            walk, deep = walked(case), walked(case, 6)
            for one, depth in ((walk, int(walk.counts.max())), (deep, 6)):
                assert_as_plain(one, case)
                assert one.nodes.shape[1] == depth


@pytest.mark.parametrize("greedy", [True, False])
def test_the_walk_on_the_host_shows_what_it_emits_and_writes_to_nothing_that_it_is_given(greedy):
    for case in cases(100):
        if len(case.tokens) > 1 or case.ends[0]:
            continue
        rules, shown, sequences = rules_of(case, *(() if greedy else (Counts(),))), [], torch.full((1, WIDTH), 6)
        assert rules.greedy == greedy
        walk = on_host(case, rules, sequences, stream=SimpleNamespace(show=shown.append))
        assert [int(column) for column in shown] == walk.tokens[0, : int(walk.counts)].tolist()
        assert (sequences == 6).all()


class Counts:
    """A criterion that the library does not know, which never fires."""

    def __call__(self, input_ids, scores, **kwargs):
        return torch.zeros(len(input_ids), dtype=torch.bool)


def test_in_lockstep_rows_stop_together_and_those_that_have_ended_emit_padding():
    for case in cases(150):
        rows = range(len(case.tokens))
        case = case._replace(lengths=[8] * len(rows), ends=[end and 7 for end in case.ends], max_length=30)
        if all(case.ends):
            continue
        shown: list[torch.Tensor] = []
        walk = on_host(case, rules_of(case, Counts()), stream=SimpleNamespace(show=shown.append))
        alone = {row: plain(case, row) for row in rows if not case.ends[row]}
        # A row that goes on decides how far; one that ends on the way is padded up to there, as far as it has nodes of
        # padding below it, which these have not.
        counts = set(walk.counts.tolist())
        assert len(counts) == 1
        count = counts.pop()
        assert 1 <= count <= max(len(nodes) for nodes, _, _ in alone.values()) + 1
        assert len(shown) == count
        for row in rows:
            tokens = walk.tokens[row, :count].tolist()
            assert tokens == [int(column[row]) for column in shown]
            nodes, emitted, end = alone.get(row, ([], [], 7))
            assert tokens[: len(emitted)] == emitted[:count] and set(tokens[len(emitted) :]) <= {0}
            assert walk.nodes[row, : min(count, len(nodes))].tolist() == nodes[:count]
            assert int(walk.observed[row]) == min(count, len(nodes))  # the drafter is not shown the padding
            assert int(walk.ends[row]) == (end if end - 8 <= count else 0)
        goes_on = [len(nodes) for nodes, _, end in alone.values() if not end]
        assert count <= min(goes_on, default=count)


def eighths(case: Case, seed: int) -> list[list[list[float]]]:
    """Probabilities (B, N, V): multiples of 1/8, many of them 0 or alike, those of children's tokens often high."""
    dice = random.Random(seed)
    found = []
    for tree, tokens in zip(case.trees, case.tokens):
        found.append([[0.0] * VOCABULARY for _ in range(tree.num_nodes)])
        for node, law in enumerate(found[-1]):
            likely = [tokens[child] for child in tree.children(node)] + [dice.randrange(VOCABULARY)]
            for _ in range(8):
                law[dice.choice(likely)] += 1 / 8
    return found


def plain_typical(case: Case, row: int, chances, threshold: float, alpha: float) -> list[int]:
    """The rule of the paper, for one row, node by node: the choices at every node, -1 off the accepted path."""
    tree, tokens = case.trees[row], case.tokens[row]
    accepted: dict[int, float] = {0: 1.0}  # and the probability of the path
    for node in range(1, tree.num_nodes):
        above = tree.parents[node]
        law = chances[row][above]
        enough = min(threshold, alpha * math.exp(sum(chance * math.log(chance + 1e-5) for chance in law)))
        if above in accepted and tree.depths[node] <= case.reach[row] and law[tokens[node]] > enough:
            accepted[node] = accepted[above] * law[tokens[node]]
    longest = max(tree.depths[node] for node in accepted)
    at = max((node for node in accepted if tree.depths[node] == longest), key=lambda node: (accepted[node], -node))
    choices = [-1] * tree.num_nodes
    while at:
        choices[tree.parents[at]] = tokens[at]
        at = tree.parents[at]
    return choices


@pytest.mark.parametrize("threshold, alpha", [(0.25, 99.0), (1.0, 0.7), (0.0, 0.0)])
def test_typical_acceptance_is_the_plain_rule_in_every_row(threshold, alpha):
    """In the first setting some probabilities equal the threshold, which is not enough."""
    for seed, case in enumerate(cases(50)):
        chances = eighths(case, seed)
        reach, rows = torch.tensor(case.reach), range(len(case.tokens))
        found = typical_choices(torch.tensor(chances).double(), case.candidates, reach, threshold, alpha)
        assert found.tolist() == [plain_typical(case, row, chances, threshold, alpha) for row in rows]
