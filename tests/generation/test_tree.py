"""Draft trees: the published implementations' own buffers, what is refused, and every form in which a tree is given."""

import json
from itertools import count
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_drafthead.bases.topology import Topology
from hf_drafthead.generation import DraftTree, published_trees
from hf_drafthead.generation import tree as tree_module
from hf_drafthead.generation.tree import resolve

GOLDEN = Path(__file__).parent.parent / "golden"
BUFFERS = sorted(path.stem for path in GOLDEN.glob("tree_buffers_*.json"))
assert len(BUFFERS) == 4
EXAMPLE = [(0,), (1,), (0, 0), (0, 1)]


@pytest.mark.parametrize("name", BUFFERS)
def test_the_buffers_are_those_of_the_published_code(name):
    golden = json.loads((GOLDEN / f"{name}.json").read_text())
    tree = DraftTree(golden["paths"])
    topology = tree.topology()
    assert torch.equal(topology.ancestors[0].long(), torch.tensor(golden["attn_mask"]))
    assert topology.depths[0].tolist() == golden["position_depths"] == list(tree.depths)
    # theirs numbers the best ten guesses of every head one after the other, behind the root
    ranks = [0, *(path[-1] + 10 * (len(path) - 1) + 1 for path in tree.paths)]
    assert ranks == golden["tree_indices"]
    lines = [[node for node in line if node >= 0] for line in golden["retrieve_indices"]]
    for line in lines:
        leaf, depth = line[-1], len(line) - 1
        assert topology.paths[0, leaf, : depth + 1].tolist() == line
        assert topology.paths[0, leaf, depth + 1 :].sum() == 0
        assert not tree.children(leaf)
    assert len(lines) == sum(not tree.children(node) for node in range(tree.num_nodes))


def test_a_tree_by_hand():
    tree = DraftTree([(1,), (0, 1), (0,), (0, 0)])
    assert tree.paths == ((0,), (1,), (0, 0), (0, 1))
    assert tree.parents == (0, 0, 0, 1, 1)
    assert tree.depths == (0, 1, 1, 2, 2)
    assert (tree.num_nodes, tree.max_depth, tree.max_rank) == (5, 2, 1)
    assert [tree.children(node) for node in range(5)] == [(1, 2), (3, 4), (), (), ()]
    assert tree.topology().unrelated[0, 3].tolist() == [True, False, True, False, True]
    assert tree == DraftTree(EXAMPLE) and hash(tree) == hash(DraftTree(EXAMPLE)) and tree != DraftTree([(0,)])
    assert repr(tree) == "DraftTree(5 nodes, depth 2)"


def test_the_root_alone():
    tree = DraftTree([])
    assert (tree.paths, tree.parents, tree.depths) == ((), (0,), (0,))
    assert (tree.num_nodes, tree.max_depth, tree.max_rank) == (1, 0, -1)
    assert tree.topology().paths.tolist() == [[[0]]] and tree.levels() == ()


def test_trees_of_several_rows_have_the_topologies_of_each():
    trees = [DraftTree([(0,), (1,), (0, 0), (0, 1)]), DraftTree([(0,), (1,), (2,), (1, 0)])]
    alone = [tree.topology() for tree in trees]
    parents, depths = torch.cat([one.parents for one in alone]), torch.cat([one.depths for one in alone])
    for found, *expected in zip(Topology.of(parents, depths, 2), *alone):
        assert torch.equal(found, torch.cat(expected))


def test_the_levels_ask_for_no_more_guesses_than_there_are_ranks():
    assert [level.width for level in DraftTree([(0,), (4,), (0, 1)]).levels()] == [5, 2]
    assert DraftTree([(0,), (0, 0)]).topology().paths.shape == (1, 3, 3)


def test_a_drawing():
    assert DraftTree([*EXAMPLE, (0, 0, 2)]).draw() == "root\n├── 0\n│   ├── 0\n│   │   └── 2\n│   └── 1\n└── 1"


def test_json_and_back():
    tree = DraftTree([(3,), (3, 1), (0,)])
    assert DraftTree.from_json(json.dumps(tree.paths)) == tree
    with pytest.raises(ValueError, match=r"the tree '\[\[0\], ' is not JSON .*: give an array of rank paths such as"):
        DraftTree.from_json("[[0], ")
    with pytest.raises(ValueError, match=r"is not JSON \(maximum recursion depth exceeded.*\): give an array of rank"):
        DraftTree.from_json("[" * 100_000)
    with pytest.raises(ValueError, match=r"is not JSON \(Exceeds the limit .*\): give an array of rank paths such as"):
        DraftTree.from_json(f"[[{'9' * 5000}]]")


def test_cutting_a_tree():
    tree = DraftTree([(0,), (0, 0), (0, 0, 0), (1,)])
    assert tree.cut(2).paths == ((0,), (1,), (0, 0))
    assert tree.cut(1).paths == ((0,), (1,))
    assert tree.cut(3) is tree and tree.cut(9) is tree


REFUSED = {
    "orphan": (
        [(0,), (1, 0)],
        ValueError,
        r"^node \(1, 0\) has no parent: add \(1,\) to the tree, or drop every node that starts with \(1,\)\.$",
    ),
    "deep orphan": ([(0,), (0, 0, 0)], ValueError, r"^node \(0, 0, 0\) has no parent: add \(0, 0\) to the tree"),
    "duplicate": ([(0,), (1,), (0,)], ValueError, r"^node \(0,\) is in the tree 2 times: keep it once\.$"),
    "negative": (
        [(0,), (-1,)],
        ValueError,
        r"^a tree has the node \(-1,\): expected at least one rank, counted from 0",
    ),
    "the root": ([(0,), ()], ValueError, r"^a tree has the node \(\): expected at least one rank, .* always there\.$"),
    "a number": (7, TypeError, r"^a tree was given as 7 \(int\): expected rank paths such as"),
    "text": (b"[[0]]", TypeError, r"^a tree was given as b'\[\[0\]\]' \(bytes\): expected rank paths such as"),
    "flat": ([0, 1], TypeError, r"^a tree has the path 0 \(int\): expected rank paths such as"),
    "paths of text": (["00"], TypeError, r"^a tree has the path '00' \(str\): expected rank paths such as"),
    "fractions": ([[0.5]], TypeError, r"^the path \[0.5\] holds something other than integers: expected rank paths"),
    "too many nodes": (
        ((rank,) for rank in count()),
        ValueError,
        r"^a tree has more than 4,096 nodes, the root included, or a path of more than 256 ranks: keep the most",
    ),
    "too deep": (
        [[0], [0] * 100_000],
        ValueError,
        r"^a tree has more than 4,096 nodes, the root included, or a path of more than 256 ranks: keep the most",
    ),
    "a long orphan": (
        [range(200)],
        ValueError,
        r"^node \(0, 1, .{,60}, \.\.\.\) has no parent: add \(0, 1, .{,200}\.$",
    ),
    "long text": ("x" * 10_000, TypeError, r"^a tree was given as 'xx.{,60}xx' \(str\): expected rank paths"),
    "truth": ([[True]], TypeError, r"^the path \[True\] holds something other than integers"),
}


@pytest.mark.parametrize("paths, error, text", REFUSED.values(), ids=REFUSED)
def test_a_tree_that_cannot_be_is_refused(paths, error, text):
    with pytest.raises(error, match=text):
        DraftTree(paths)


def test_a_setting_is_resolved():
    tree = DraftTree(EXAMPLE)
    assert resolve(tree, None, 10) is tree
    assert resolve([[0], [1], [0, 0], [0, 1]], 2, 10) == tree
    assert resolve("mc_sim_7b_63", 2, 100).max_depth == 2
    assert resolve("mc_sim_7b_63", None, 100).num_nodes == 64


def test_a_setting_that_does_not_fit_is_refused():
    with pytest.raises(ValueError, match=r"node \(0, 0\) at depth 2, but the model has 1 draft heads: drop every path"):
        resolve(EXAMPLE, 1, 10)
    with pytest.raises(ValueError, match=r"node \(0, 1\) with rank 1, but a vocabulary of 1 tokens has ranks 0 to 0"):
        resolve([(0,), (0, 1)], None, 1)
    with pytest.raises(
        ValueError, match=r"node \(9{10,}\.\.\.9{10,},\) with rank 9{10,}\.\.\.9{10,}, but a vocabulary of 5"
    ):
        resolve([(10**4000 - 1,)], None, 5)
    with pytest.raises(ValueError, match=r"draft_tree 'mc_sim' is no published tree: expected one of .*mc_sim_7b_63"):
        resolve("mc_sim", None, 10)


@st.composite
def rank_paths(draw) -> list[tuple[int, ...]]:
    """Any tree, in any order."""
    nodes: list[tuple[int, ...]] = [()]
    for parent, rank in draw(st.lists(st.tuples(st.integers(0, 40), st.integers(0, 5)), min_size=1, max_size=40)):
        path = (*nodes[parent % len(nodes)], rank)
        if path not in nodes:
            nodes.append(path)
    return draw(st.permutations(nodes[1:]))


@settings(max_examples=200, deadline=None)
@given(rank_paths())
def test_any_tree_has_the_topology_and_levels_that_its_paths_say(paths):
    tree = DraftTree(paths)
    nodes = [(), *tree.paths]
    assert sorted(paths) == sorted(tree.paths) and nodes == sorted(nodes, key=lambda path: (len(path), path))
    topology = tree.topology()
    for node, path in enumerate(nodes):
        line = [nodes.index(path[:depth]) for depth in range(len(path) + 1)]
        assert topology.depths[0, node] == tree.depths[node] == len(path)
        assert topology.parents[0, node] == tree.parents[node] == nodes.index(path[:-1])
        assert topology.ancestors[0, node].nonzero().flatten().tolist() == sorted(line)
        assert topology.paths[0, node].tolist() == line + [0] * (tree.max_depth + 1 - len(line))
        below = [other for other, longer in enumerate(nodes) if longer[:-1] == path and longer]
        assert tree.children(node) == tuple(below)
    before, filled = [0], 1
    for depth, level in enumerate(tree.levels(), start=1):
        expanded = level.expanded.tolist()
        assert expanded == sorted({tree.parents[node] for node in range(tree.num_nodes) if tree.depths[node] == depth})
        assert [before[place] for place in level.hang_on.tolist()] == [tree.parents[node] for node in expanded]
        for slot, rank in zip(level.slots.tolist(), level.ranks.tolist()):
            assert nodes[filled] == (*nodes[expanded[slot]], rank) and rank < level.width
            filled += 1
        before = expanded
    assert filled == tree.num_nodes
    drawn = tree.draw().splitlines()
    assert [line.split()[-1] for line in drawn] == ["root", *(str(path[-1]) for path in sorted(tree.paths))]
    assert DraftTree.from_json(json.dumps(tree.paths)) == tree


def test_the_largest_and_the_deepest_trees():
    deep = [[0] * depth for depth in range(1, 257)]
    for paths in ([[rank] for rank in range(4095)], deep + [[0] * 255 + [rank] for rank in range(1, 3839 + 1)]):
        tree = DraftTree(paths)
        topology = tree.topology()
        assert topology.ancestors.sum() == sum(tree.depths) + 4096 and len(tree.levels()) == tree.max_depth
        assert len(tree.draw().splitlines()) == tree.num_nodes == 4096
    with pytest.raises(ValueError, match="more than 4,096 nodes"):
        DraftTree([[rank] for rank in range(4096)])


# JSON as it may stand in anybody's file: mostly near a tree, now and then nothing of the kind.
near_a_tree = st.recursive(
    st.none() | st.booleans() | st.integers(-2, 3) | st.integers() | st.floats(allow_nan=False) | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=2), inner, max_size=2),
    max_leaves=12,
)


@settings(max_examples=500, deadline=None)
@given(near_a_tree | st.lists(st.lists(st.integers(-1, 2), max_size=3), max_size=6))
def test_whatever_is_given_is_a_tree_or_is_refused_in_one_line(given):
    try:
        tree = resolve(given, 3, 50)
    except (TypeError, ValueError) as error:
        message = str(error)
        assert message.endswith(".") and "\n" not in message and len(message) < 500, message
    else:
        tree.topology()
        assert bool(tree.levels()) == bool(tree.paths)


PUBLISHED = {
    "eagle_mc_sim_7b_63": (26, 5),
    "hydra_single": (2, 1),
    "mc_sim_7b_63": (64, 4),
    "medusa_vicuna_13b_stage1": (64, 4),
    "medusa_vicuna_13b_stage2": (64, 4),
    "medusa_vicuna_33b_stage1": (64, 3),
    "medusa_vicuna_33b_stage2": (64, 4),
    "medusa_vicuna_7b_stage1": (64, 4),
    "medusa_vicuna_7b_stage1_ablation": (64, 4),
    "medusa_vicuna_7b_stage2": (64, 4),
    "medusa_zephyr_stage2": (64, 4),
}


def test_the_published_trees_are_all_there():
    assert published_trees() == sorted(PUBLISHED)


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_tree_is_whole_and_says_where_it_comes_from(name):
    tree = DraftTree.from_name(name)
    file = json.loads((Path(tree_module.__file__).parent / "trees" / f"{name}.json").read_text())
    assert file["name"] == name and len(file["provenance"]) > 20
    assert DraftTree(file["paths"]) == tree
    assert (tree.num_nodes, tree.max_depth) == PUBLISHED[name]
    # siblings' ranks leave none out, so the top-k of a node holds as many guesses as it has children
    for node in range(tree.num_nodes):
        assert [tree.paths[child - 1][-1] for child in tree.children(node)] == list(range(len(tree.children(node))))
    assert DraftTree.from_name(name) is tree
