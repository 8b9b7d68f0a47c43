"""What somebody does who has no hf_drafthead: run as a script, given a folder of checkpoints; prints JSON.

Each checkpoint's own file of code is all there is; the package itself cannot be imported.
"""

import contextlib
import json
import sys
from pathlib import Path


class NotInstalled:
    """Finds no hf_drafthead, wherever it may lie."""

    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "hf_drafthead":
            raise ModuleNotFoundError(f"No module named {name!r}")


if __name__ == "__main__":  # whoever only reads this file keeps the package
    sys.meta_path.insert(0, NotInstalled())

import torch  # noqa: E402
from transformers import AutoModel, AutoModelForCausalLM  # noqa: E402

TRUST = {"trust_remote_code": True, "dtype": torch.float64}
# Two rows of different lengths, padded on the left.
PROMPT = {
    "input_ids": torch.tensor([[0, 0, 0, 5, 9, 11], [3, 17, 8, 22, 41, 6]]),
    "attention_mask": torch.tensor([[0, 0, 0, 1, 1, 1], [1, 1, 1, 1, 1, 1]]),
}
TREE = [[0], [1], [0, 0], [2], [0, 1], [1, 0], [0, 0, 0]]
SETTINGS = {"max_new_tokens": 24, "draft_tree": TREE, "return_dict_in_generate": True}


def generated(model, seed=0, prompt=PROMPT, **settings):
    """The heads' output, and whether the base gives the same tokens and leaves the generator in the same state."""
    torch.manual_seed(seed)
    got = model.generate(**prompt, **SETTINGS, **settings)
    left_at = torch.get_rng_state()
    torch.manual_seed(seed)
    expected = model.base.generate(**prompt, max_new_tokens=24, **settings)
    return got, torch.equal(got.sequences, expected) and torch.equal(left_at, torch.get_rng_state())


def found(folder: Path) -> dict:
    """Everything that the tests ask about one checkpoint."""
    model = AutoModelForCausalLM.from_pretrained(folder, **TRUST)
    greedy, same_greedy = generated(model, do_sample=False)
    sampled, same_sampled = generated(model, seed=3, do_sample=True, temperature=0.8, top_p=0.9)
    one_row = {name: rows[1:] for name, rows in PROMPT.items()}
    _, same_alone = generated(model, seed=4, prompt=one_row, do_sample=True, temperature=1.2)
    _, same_penalised = generated(model, do_sample=False, repetition_penalty=1.3, no_repeat_ngram_size=2)
    static = model.generate(**PROMPT, **SETTINGS, do_sample=False, cache_implementation="static")
    published = model.generate(**PROMPT, max_new_tokens=8, draft_tree="mc_sim_7b_63", do_sample=False)
    saved, whole = folder.parent / f"{folder.name}-saved", folder.parent / f"{folder.name}-whole"
    model.save_pretrained(saved)
    model.save_pretrained(whole, include_base=True)
    again = AutoModel.from_pretrained(saved, **TRUST, base_model=model.base.name_or_path)
    with_base = type(model).from_pretrained(whole, dtype=torch.float64)
    name = type(model).__module__
    refusals = []
    for refused in ({"draft_tree": "nonesuch"}, {"lookup_texts": [[3, 17, 8, 22]]}):
        try:
            model.generate(**PROMPT, **refused)
        except (ImportError, ValueError) as error:
            refusals.append(str(error))
    return {
        "class": type(model).__name__,
        "config": type(model.config).__name__,
        "module": name,
        "version": sys.modules[name].__version__,
        "greedy": greedy.sequences.tolist(),
        "accepted_lengths": greedy.accepted_lengths.tolist(),
        "sampled_accepted_lengths": sampled.accepted_lengths.tolist(),
        "same": {"greedy": same_greedy, "sampled": same_sampled, "alone": same_alone, "penalised": same_penalised},
        "static": static.sequences.tolist(),
        "why_no_drafts": model.why_no_drafts(),
        "published": torch.equal(published, model.base.generate(**PROMPT, max_new_tokens=8, do_sample=False)),
        "saved_files": sorted(path.name for path in saved.iterdir()),
        "saved_code": (saved / "modeling_drafthead.py").read_text() == (folder / "modeling_drafthead.py").read_text(),
        "saved_again": [
            {
                "tensors": all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters())),
                "greedy": other.generate(**PROMPT, **SETTINGS, do_sample=False).sequences.tolist(),
            }
            for other in (again, with_base)
        ],
        "refusals": refusals,
    }


if __name__ == "__main__":
    with contextlib.redirect_stdout(sys.stderr):
        root = Path(sys.argv[1])
        results = {folder.parent.name: found(folder.parent) for folder in sorted(root.glob("*/modeling_drafthead.py"))}
        imported = sorted({name.partition(".")[0] for name in sys.modules})
    print(json.dumps({"families": results, "imported": imported}))
