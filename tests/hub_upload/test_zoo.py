"""The zoo's heads, pushed and loaded back: the same tensors, the same text, the same number of steps."""

from pathlib import Path

import pytest

from hf_drafthead import zoo

COMPARE = """
tokenizer = AutoTokenizer.from_pretrained("org/base")
prompt = tokenizer(["def read_json(path):\\n", "import os\\n"], return_tensors="pt", padding=True)
told = {}
for folder, name in pairs:
    here = AutoModelForCausalLM.from_pretrained(folder)
    here.config.base_model_name_or_path = "org/base"
    here.push_to_hub(name, license="apache-2.0", token="hf_owner")
    there = AutoModelForCausalLM.from_pretrained(name)
    ours, theirs = here.state_dict(), there.state_dict()
    outs = [model.generate(**prompt, max_new_tokens=8, return_dict_in_generate=True) for model in (here, there)]
    told[name] = [
        type(here) is type(there),
        ours.keys() == theirs.keys() and all(torch.equal(ours[key], theirs[key]) for key in ours),
        torch.equal(outs[0].sequences, outs[1].sequences),
        torch.equal(outs[0].accepted_lengths, outs[1].accepted_lengths),
        there.generation_config.draft_tree == here.generation_config.draft_tree,
    ]
print(json.dumps(told))
"""


@pytest.mark.slow
def test_the_zoo_pushed_and_loaded_back_is_the_same(hub, clients):
    base = Path(zoo.path("base"))
    hub.add("org/base", {path.name: path.read_bytes() for path in base.iterdir()})
    pairs = [(zoo.path(family), "org/" + family.replace("+", "-plus")) for family in zoo.families()]
    assert len(pairs) >= 2
    told = clients.run(COMPARE, pairs=pairs).said
    assert told == {name: [True] * 5 for _, name in pairs}
    for _, name in pairs:
        assert "training_summary.json" in hub.repos[name].files()
