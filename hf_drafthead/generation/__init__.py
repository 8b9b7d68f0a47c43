"""Draft trees, the walks and the decoding loop: tensors only, no head family. In short: `generate_plainly`."""

import torch

from hf_drafthead.bases.probe import probe
from hf_drafthead.bases.releases import CACHE
from hf_drafthead.generation.entry import prompt_for_drafter
from hf_drafthead.generation.lookup import TextIndex
from hf_drafthead.generation.mixin import DraftHeadGenerationMixin
from hf_drafthead.generation.state import DraftHeadGenerateOutput, Guesses, StepRecord
from hf_drafthead.generation.tree import DraftTree, published_trees

__all__ = [
    "DraftHeadGenerateOutput",
    "DraftHeadGenerationMixin",
    "DraftTree",
    "Guesses",
    "StepRecord",
    "TextIndex",
    "generate_plainly",
    "published_trees",
]


@torch.no_grad()
def generate_plainly(base, drafter, ids: torch.Tensor, tree: DraftTree, new_tokens: int = 32) -> torch.Tensor:
    """The greedy text of one row, as `generate` writes it: the algorithm alone, for reading.

    N nodes of a tree, the root included; F*H features. `generate` does the same for many rows, texts and settings.

    Args:
        base, drafter: of a model with draft heads.
        ids: (1, P) prompt.
        tree: of rank paths.
        new_tokens: to write.

    Returns:
        (1, P + new_tokens) token ids.
    """
    reader, length, room = probe(base, drafter.reads), ids.shape[1], ids.shape[1] + new_tokens + tree.max_depth + 1
    cache, topology = reader.cache(1, room, tree.num_nodes), tree.topology(ids.device)
    logits, features = reader(True, input_ids=ids, use_cache=True, **{CACHE: cache})
    cache.count(length)
    text = torch.cat([ids, logits[:, -1].argmax(-1, keepdim=True)], dim=1)  # the base chooses the first root
    seen = prompt_for_drafter(drafter, text[:, -1:], features, ids, None)
    memory = drafter.observe(drafter.start(1, room), *seen)

    def draft(memory):  # level by level the drafter's best guesses, below the token that the base chose last
        tokens = text[:, -1:]
        for level in tree.levels(ids.device):
            memory, guesses = drafter.expand(memory, tokens[:, level.expanded], level.hang_on[None])
            best, _ = guesses.top(level.width)
            slots = level.slots if best.shape[1] > 1 else 0
            tokens = torch.cat([tokens, best[:, slots, level.ranks]], dim=1)
        return memory, tokens  # (1, N)

    def verify(tokens):  # one forward over all nodes, each of which sees the past and the nodes above it
        positions = cache.lengths[:, None] + topology.depths
        logits, features = reader.nodes(tokens, topology, cache, positions, None)
        return logits.float().argmax(-1), features  # (1, N), (1, N, F*H)

    def walk(tokens, choice):  # down from the root, as long as a child carries what the base chooses
        path: list[int] = []
        child: int | None = 0
        while child is not None:
            path.append(child)
            right = (node for node in tree.children(path[-1]) if tokens[0, node] == choice[0, path[-1]])
            child = next(right, None)
        return torch.tensor([path], device=ids.device)  # (1, A) of the nodes

    def commit(memory, choice, features, path):  # keys, features and tokens of these nodes stay
        count, new = torch.tensor([path.shape[1]], device=ids.device), choice.gather(1, path)
        cache.keep(path, count)
        return drafter.observe(memory, features[:, path[0]], new, count), torch.cat([text, new], dim=1)

    while text.shape[1] < length + new_tokens:
        memory, tokens = draft(memory)
        choice, features = verify(tokens)
        path = walk(tokens, choice)
        memory, text = commit(memory, choice, features, path)
    return text[:, : length + new_tokens]
