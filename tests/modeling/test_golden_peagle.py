"""P-EAGLE gives the numbers of the original implementation: training forward, losses."""

import torch

from hf_drafthead.bases.reader import Reading
from hf_drafthead.training.heads_loss import HeadsLoss
from tests.modeling.block_golden import load

THEIRS = {"atol": 1e-4, "rtol": 0.0}


@torch.no_grad()
def test_a_training_forward_of_speculators(tmp_path):
    """Every element, behind its pair and at its depth, among two packed documents."""
    case = load("peagle_s_llama_layers_k4")
    given, drafter = case.tensors, case.model(tmp_path).drafter
    anchors, depths, documents = given["out.anchor_pos"], given["out.depth"], given["in.document_ids"][0]
    found = torch.full_like(given["out.logits"][0], torch.nan)
    start = 0
    for document in documents.unique():
        text = (documents == document).nonzero().flatten()
        text = slice(int(text[0]), int(text[-1]) + 1)
        # their entries are pairs already: (x_{t+1}, states of t); and the positions go on from document to document
        ids = torch.cat([given["in.input_ids"][:, :1], given["in.input_ids"][:, text]], dim=1)
        features = torch.nn.functional.pad(given["in.hidden_states"][:, text], (0, 0, 0, 1))
        states = drafter.head_states(features, ids)
        inside = ((anchors >= text.start) & (anchors < text.stop)).nonzero().flatten()
        for element in inside.tolist():
            state = states[int(depths[element])][0, int(anchors[element]) - text.start]
            found[element] = drafter.head_logits(0, state)
        start = text.stop
    assert start == len(documents) and drafter.config.num_draft_heads == 4
    torch.testing.assert_close(found, given["out.logits"][0], **THEIRS)


def test_depths_are_drawn_among_those_before_and_the_loss_is_their_mean(tmp_path):
    model = load("e2e_peagle_s_qwen3_k5").model(tmp_path).train()
    drafter = model.drafter.requires_grad_(True)
    drawn = drafter.drawn(40)
    assert [len(some) for some in drawn] == [40, 27, 18, 12, 8]  # int((40 - d) * max(0.7 ** d, 0.2))
    for before, some in zip(drawn, drawn[1:]):
        assert set(some) <= set(before)
    assert max(torch.tensor(drawn[-1]).diff()) < 12  # spread over the text
    ids, features = torch.randint(3, 120, (2, 48)), torch.randn(2, 48, 192)
    hidden, anchors = torch.randn(2, 48, 64), torch.arange(1, 41).expand(2, -1)
    inputs = {"input_ids": ids, "labels": ids.clone(), "anchors": anchors}
    loss, _ = HeadsLoss(teacher=1.0)(model, inputs, reading=Reading(features, hidden, hidden))
    loss.backward()
    found = drafter.mask_hidden.grad.clone()
    drafter.zero_grad()
    base, total, count = model.base.lm_head(hidden).softmax(-1).detach(), 0.0, 0
    for depth, (state, some) in enumerate(zip(drafter.eval().head_states(features, ids), drawn)):
        places = anchors[0, some]
        kept = places[places + 2 + depth < 48]
        right = base[:, kept + 1 + depth]
        total = total - (right * drafter.head_logits(depth, state[:, kept]).log_softmax(-1)).sum()
        count = count + 2 * len(kept)
    (total / count).backward()
    torch.testing.assert_close(loss, total / count)
    torch.testing.assert_close(found, drafter.mask_hidden.grad, atol=1e-5, rtol=1e-4)
