"""Runs where the speculators library is installed: loads an exported head there, runs it, and saves it again.

python in_speculators.py FOLDER INPUT OUTPUT SAVED: INPUT holds `features` (1, T, F*H) and `tokens` (1, T) that follow
them; OUTPUT gets `logits` (1, T, D) and `tokens` (D,) of the draft vocabulary; SAVED the head as that library saves it.
"""

import sys

import torch
from safetensors.torch import load_file, save_file
from speculators.models.eagle3 import Eagle3DraftModel, Eagle3SpeculatorConfig

folder, given, output, saved = sys.argv[1:]
config = Eagle3SpeculatorConfig.from_pretrained(folder)
config.transformer_layer_config._attn_implementation = "eager"
model = Eagle3DraftModel.from_pretrained(folder, config=config, dtype=torch.float32)
stored = set(load_file(f"{folder}/model.safetensors"))
assert stored <= set(model.state_dict()), f"the library ignores {sorted(stored - set(model.state_dict()))}"
if "embed_tokens.weight" not in stored:  # 0.9.0 leaves them uninitialized, and takes the verifier's if they are NaN
    torch.nn.init.constant_(model.embed_tokens.weight, torch.nan)
model.load_verifier_weights()
model.eval()
tensors = load_file(given)
logits = []
model.lm_head.register_forward_hook(lambda module, inputs, out: logits.append(out))
with torch.no_grad():
    model(
        hidden_states=tensors["features"],
        input_ids=tensors["tokens"],
        document_ids=torch.zeros_like(tensors["tokens"]),
        ttt_steps=1,
    )
count = logits[0].shape[-1]
offsets = torch.zeros(count, dtype=torch.long) if model.d2t is None else model.d2t
save_file({"logits": logits[0].contiguous(), "tokens": offsets + torch.arange(count)}, output)
model.save_pretrained(saved)
