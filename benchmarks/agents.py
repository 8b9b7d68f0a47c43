"""Tokens per step on traffic of a program that calls tools: 40 conversations of three calls each.

    python benchmarks/agents.py --questions mt_bench_question.jsonl spec_bench_question.jsonl
    python benchmarks/agents.py --questions ... --heads hydra++ --answers --limit 8

The questions are those of `agents.json`, by their ids in the files of MT-Bench and Spec-Bench, with the tools that each
may call. The chat model is told the tools, asked the question, and given an answer of each tool that it has called, of
which it then writes the next call. All is greedy, in float32. `--heads` names the family beside whose guesses copies
stand, by default none; `--answers` copies from the answers of earlier conversations too.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import hf_drafthead
from hf_drafthead import zoo
from hf_drafthead.generation.lookup import TextIndex

SET = Path(__file__).with_name("agents.json")
CALL = '<tool_call>\n{"name": "%s", "arguments": %s}\n</tool_call>'


def questions(files: list[str]) -> dict[int, str]:
    """The first turn of every question, by its id."""
    rows = [json.loads(line) for file in files for line in Path(file).read_text("utf-8").splitlines()]
    return {row["question_id"]: row["turns"][0] for row in rows}


def system(tools: list[dict[str, Any]]) -> str:
    """What the model is told of its tools."""
    example = CALL % (tools[0]["name"], json.dumps(dict.fromkeys(tools[0]["parameters"], "...")))
    return f"You solve tasks by calling tools. The tools are:\n{json.dumps(tools)}\nAnswer with one call:\n{example}"


def answer_of_tool(question: str, turn: int) -> str:
    """What a tool answers: a third of the question's text, with what programs put around it."""
    third = len(question) // 3 + 1
    found = {"id": f"doc-{turn}", "title": question[:40], "content": question[turn * third : (turn + 1) * third][:300]}
    return f"<tool_response>\n{json.dumps({'status': 'ok', 'results': [found]})}\n</tool_response>\nCall the next tool."


def prompts(tokenizer: Any, of_set: dict[str, Any], texts: dict[int, str]) -> list[tuple[str, list[Any]]]:
    """Of each conversation the question, cut to 800 characters, and its first messages."""
    found = []
    for number, names in of_set["conversations"]:
        tools = [{"name": name, **of_set["tools"][name]} for name in names]
        question = texts[number][:800]
        turns = [{"role": "system", "content": system(tools)}, {"role": "user", "content": question}]
        found.append((question, turns))
    return found


def run(model: Any, tokenizer: Any, conversations: list[Any], turns: int, tokens: int, **how: Any) -> tuple[int, int]:
    """How many tokens were written behind the first of each call, and in how many steps."""
    written = steps = 0
    index = how.get("lookup_texts")
    for question, beginning in conversations:
        messages = [*beginning]
        for turn in range(turns):
            ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)["input_ids"]
            call = {"input_ids": torch.tensor([ids]), "max_new_tokens": tokens, "do_sample": False}
            output = model.generate(**call, **how, return_dict_in_generate=True)
            written, steps = written + int(output.accepted_lengths.sum()), steps + output.accepted_lengths.shape[1]
            answer = output.sequences[0, len(ids) :].tolist()
            if index is not None:
                index.put([*ids[-4:], *answer])
            messages.append({"role": "assistant", "content": tokenizer.decode(answer, skip_special_tokens=True)})
            messages.append({"role": "user", "content": answer_of_tool(question, turn)})
    return written, steps


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--questions", nargs="+", required=True, metavar="FILE")
    options.add_argument("--heads", help="family of the chat model's heads; default: copies alone")
    options.add_argument("--copies", type=int, default=0, help="tokens that a step copies; default: the model's own")
    options.add_argument("--nodes", type=int, default=16, help="of the heads' dynamic tree")
    options.add_argument("--answers", action="store_true", help="copy from earlier answers too")
    options.add_argument("--limit", type=int, help="conversations")
    options.add_argument("--turns", type=int, default=3)
    options.add_argument("--tokens", type=int, default=64, help="of each answer")
    asked = options.parse_args()
    tokenizer = AutoTokenizer.from_pretrained(zoo.chat_base())
    if asked.heads:
        model = AutoModelForCausalLM.from_pretrained(zoo.chat_heads(asked.heads), dtype=torch.float32)
    else:
        model = hf_drafthead.from_base(zoo.chat_base(), dtype=torch.float32)
    how: dict[str, Any] = {"prompt_lookup_num_tokens": asked.copies} if asked.copies else {}
    how |= {"draft_tree": {"dynamic": {"nodes": asked.nodes}}} if asked.heads else {"draft_tree": "lookup"}
    how |= {"lookup_texts": TextIndex(capacity=1 << 16)} if asked.answers else {}
    conversations = prompts(tokenizer, json.loads(SET.read_text()), questions(asked.questions))[: asked.limit]
    written, steps = run(model.eval(), tokenizer, conversations, asked.turns, asked.tokens, **how)
    print(f"{asked.heads or 'copies alone'}: {written} tokens in {steps} steps, {written / steps:.3f} tokens per step")


if __name__ == "__main__":
    main()
