"""Tokens per step of JSON with twelve keys, whose frame a constraint leaves no choice of.

    python benchmarks/grammar.py
    python benchmarks/grammar.py --heads hydra++ --limit 2

The chat model fills in a form for each of eight descriptions, greedily, in float32: once under a
`prefix_allowed_tokens_fn` that knows the tokens of the frame and leaves the values free, once under a JSON schema by
the processor of `hf_drafthead.serving`, of llguidance. Texts are compared with the base's own.
"""

from __future__ import annotations

import argparse
import json
from typing import Any

import llguidance
import torch
from llguidance.hf import from_tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer

import hf_drafthead
from hf_drafthead import zoo
from hf_drafthead.serving.served import TokenScores

KEYS = "name category price_in_euros weight_in_grams color material country_of_origin year_of_production".split()
KEYS += "number_in_stock minimum_age is_available warranty_in_months".split()
THINGS = "a red bicycle|a steel kettle|an old violin|a wooden chair|a blue tent|a desk lamp|a leather bag|a toy train"


class Frame:
    """Allows the tokens of the frame one by one, and between them a value of six tokens at most, up to its end."""

    def __init__(self, tokenizer: Any, start: int):
        self.start, self.comma = start, tokenizer(",")["input_ids"][0]
        pieces = [f'{"{" if place == 0 else ""}\n  "{key}":' for place, key in enumerate(KEYS)]
        self.pieces = [tokenizer(piece)["input_ids"] for piece in pieces]
        texts = tokenizer.batch_decode([[token] for token in range(len(tokenizer))])
        self.free = [token for token, text in enumerate(texts) if text.strip() and not set(text) & set('{}:,"\n<|>')]
        self.ends = [tokenizer.eos_token_id]

    def __call__(self, row: int, ids: torch.Tensor) -> list[int]:
        tokens = ids[self.start :].tolist()
        for piece in self.pieces:
            for place, token in enumerate(piece):
                if place >= len(tokens):
                    return [token]
            tokens = tokens[len(piece) :]
            value = tokens[: tokens.index(self.comma)] if self.comma in tokens else tokens
            if len(value) == len(tokens):
                return self.free if not value else [self.comma] if len(value) >= 6 else [*self.free, self.comma]
            tokens = tokens[len(value) + 1 :]
        return self.ends


def schema(tokenizer: Any, vocabulary: int) -> Any:
    """Makes matchers of the form as a JSON schema."""
    text, number = {"type": "string", "maxLength": 20}, {"type": "integer", "minimum": 0, "maximum": 9999}
    properties = {key: number if "_in_" in key or key.startswith(("year", "number", "min")) else text for key in KEYS}
    properties["is_available"] = {"type": "boolean"}
    form = {"type": "object", "properties": properties, "required": KEYS, "additionalProperties": False}
    reader = from_tokenizer(tokenizer, n_vocab=vocabulary, eos_token=[tokenizer.eos_token_id])
    rules = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
    grammar = llguidance.LLMatcher.grammar_from_json_schema(json.dumps(form), overrides=rules)
    return lambda: llguidance.LLMatcher(reader, grammar)


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--heads", help="family of the chat model's heads; default: none, copies of the text")
    options.add_argument("--limit", type=int, default=8, help="descriptions")
    asked = options.parse_args()
    tokenizer = AutoTokenizer.from_pretrained(zoo.chat_base())
    if asked.heads:
        model = AutoModelForCausalLM.from_pretrained(zoo.chat_heads(asked.heads), dtype=torch.float32).eval()
        how: dict[str, Any] = {"draft_tree": {"dynamic": {"nodes": 16}}}
    else:
        model, how = hf_drafthead.from_base(zoo.chat_base(), dtype=torch.float32).eval(), {"draft_tree": "lookup"}
    matcher = schema(tokenizer, model.base.config.vocab_size)
    for name in ("prefix_allowed_tokens_fn", "llguidance"):
        written = steps = 0
        for thing in THINGS.split("|")[: asked.limit]:
            said = [{"role": "user", "content": f"Fill in a JSON form with the keys {', '.join(KEYS)} for {thing}."}]
            ids = tokenizer.apply_chat_template(said, add_generation_prompt=True, return_dict=True)["input_ids"]
            texts = []
            for each, more in ((model, how), (model.base, {})):
                constraint = {"prefix_allowed_tokens_fn": Frame(tokenizer, len(ids))}
                if name == "llguidance":
                    constraint = {"logits_processor": [TokenScores(len(ids), (0.0, 0.0), None, matcher())]}
                call = {"input_ids": torch.tensor([ids]), "max_new_tokens": 200, "do_sample": False, **constraint}
                texts.append(each.generate(**call, **more, return_dict_in_generate=True))
            assert torch.equal(texts[0].sequences, texts[1].sequences), "the text is another one"
            accepted = texts[0].accepted_lengths
            written, steps = written + int(accepted.sum()), steps + accepted.shape[1]
        print(f"{name}, {asked.heads or 'no heads'}: {written} tokens in {steps} steps, {written / steps:.3f} a step")


if __name__ == "__main__":
    main()
