"""Heads that learn from what they serve: tokens per step, a hundred requests at a time.

    python benchmarks/learning.py --heads eagle3                          # the bundled heads, pieces of Python files
    python benchmarks/learning.py --heads hydra++ --fresh                 # heads just made
    python benchmarks/learning.py --heads eagle3 --traffic python:250 sql:250
    python benchmarks/learning.py --heads eagle3 --traffic python:100 poison:10000 python:100 --tokens 8
    python benchmarks/learning.py --heads FOLDER --dtype bfloat16 --traffic chats:500 --questions question.jsonl
    python benchmarks/learning.py --heads eagle3 --busy                   # no idle time: the share of the time alone
    python benchmarks/learning.py --heads eagle3 --dtype float64 --check  # every text compared with the base's own
    python benchmarks/learning.py --heads eagle3 --traffic sql:2000 --bound 60 --rate 5e-4  # what there is to gain

A model completes texts greedily, by default in float32 and 48 tokens each: pieces of the configuration files of
transformers (`python`), queries of made-up tables (`sql`), questions (`chats`, through the chat template where there is
one), random tokens (`poison`). Requests come in twenties, behind which nobody asks for a while, unless `--busy`;
`--still` leaves the heads as they are; `--check` counts texts that the base alone writes otherwise, and samples half of
them. `--bound` first writes all texts, then learns from them for so many rounds, and prints tokens per step on those
held out, with a tree of 64 nodes: what heads of this kind gain where neither time nor texts are few.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from pathlib import Path
from typing import Any

import torch
import transformers
from soak import resident_mb
from transformers import AutoModelForCausalLM, AutoTokenizer

import hf_drafthead
from hf_drafthead import zoo
from hf_drafthead.learning.learner import FRESH, Learner

AT_ONCE, LINES, LONGEST = 20, 12, 64
TABLES = {
    "orders": ["order_id", "customer_id", "total", "created_at", "status"],
    "customers": ["customer_id", "name", "email", "country"],
    "products": ["product_id", "title", "price", "stock", "supplier_id"],
    "invoices": ["invoice_id", "order_id", "amount", "due_date", "paid"],
    "suppliers": ["supplier_id", "company", "city", "phone"],
}


def query(dice: random.Random) -> str:
    """A query of one of the tables."""
    table = dice.choice(sorted(TABLES))
    columns = TABLES[table]
    some, where, by = dice.sample(columns, 3), dice.choice(columns), dice.choice(columns)
    values = ", ".join(str(dice.randrange(900)) for _ in columns)
    kinds = [
        f"SELECT {', '.join(some)}\nFROM {table}\nWHERE {where} = {dice.randrange(1000)}\nORDER BY {by} DESC;\n",
        f"SELECT {by}, COUNT(*)\nFROM {table}\nGROUP BY {by}\nHAVING COUNT(*) > {dice.randrange(50)};\n",
        f"INSERT INTO {table} ({', '.join(columns)})\nVALUES ({values});\n",
        f"UPDATE {table}\nSET {some[0]} = {dice.randrange(1000)}\nWHERE {where} = {dice.randrange(1000)};\n",
    ]
    return dice.choice(kinds)


def prompts(tokenizer: Any, kind: str, count: int, seed: int, questions: Path | None) -> list[list[int]]:
    """Beginnings of texts of one kind."""
    dice, found = random.Random(seed), list[list[int]]()
    files = sorted((Path(transformers.__file__).parent / "models").rglob("configuration_*.py"))
    rows = [json.loads(line)["turns"][0] for line in questions.read_text().splitlines()] if questions else []
    while len(found) < count:
        if kind == "poison":
            ids = [dice.randrange(len(tokenizer)) for _ in range(LONGEST)]
        elif kind == "chats" and tokenizer.chat_template:
            turns = [{"role": "user", "content": dice.choice(rows)[:400]}]
            ids = tokenizer.apply_chat_template(turns, add_generation_prompt=True, return_dict=True)["input_ids"]
        else:
            if kind == "python":
                lines = dice.choice(files).read_text("utf-8", "ignore").splitlines(keepends=True)
                first = dice.randrange(max(len(lines) - LINES, 1))
                text = "".join(lines[first : first + LINES])
            else:
                text = "".join(query(dice) for _ in range(6)) if kind == "sql" else dice.choice(rows)
            ids = tokenizer(text[:2000])["input_ids"][:LONGEST]
        found += [ids] if len(ids) > (0 if kind == "chats" else LONGEST // 2) else []
    return found


def bound(learner: Learner, rounds: int) -> None:
    """Learn for so many rounds from texts that are there."""
    while learner.rounds + learner.dropped < rounds:
        learner.texts.fresh = FRESH
        while not learner.work():
            pass
        if learner.rounds % 5 == 0:
            print(f"{learner.counts()}, rate {learner.rate:.0e}", flush=True)


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--heads", default="eagle3", help="a bundled family, or a folder with its tokenizer")
    options.add_argument("--base", help="of fresh heads; default: the bundled one")
    options.add_argument("--traffic", nargs="+", default=["python:500"], metavar="KIND:COUNT", help="one after another")
    options.add_argument("--questions", type=Path, help="lines with `turns`, of chats")
    options.add_argument("--tokens", type=int, default=48, help="new ones of a request")
    options.add_argument("--dtype", default="float32")
    options.add_argument("--share", type=float, default=0.1)
    options.add_argument("--bound", type=int, default=0, metavar="ROUNDS", help="of learning from all texts")
    options.add_argument("--rate", type=float, default=2e-3, help="of learning, at first")
    for flag in ("--fresh", "--busy", "--still", "--check"):
        options.add_argument(flag, action="store_true")
    asked = options.parse_args()
    path = asked.heads if Path(asked.heads).is_dir() else zoo.path(asked.heads)
    base, dtype = asked.base or zoo.path("base"), getattr(torch, asked.dtype)
    tokenizer = AutoTokenizer.from_pretrained(base if asked.fresh else path)
    if asked.fresh:
        model = hf_drafthead.from_base(base, asked.heads, dtype=dtype)
    else:
        model = AutoModelForCausalLM.from_pretrained(path, dtype=dtype)
    requests = list[list[int]]()
    for seed, (kind, count) in enumerate(part.split(":") for part in asked.traffic):
        requests += prompts(tokenizer, kind, int(count), seed, asked.questions)
    manager = model.init_continuous_batching(slots=8, draft_tree={"dynamic": {"nodes": 16}})
    afterwards = Learner(model, learning_rate=asked.rate, held_out=96, memory=1 << 20) if asked.bound else None
    still = asked.still or asked.bound
    learner = None if still else manager.learn(share=asked.share, learning_rate=asked.rate)
    manager.start()
    metrics, before, begun, differ = manager._figures, (0, 0, 0), time.perf_counter(), 0
    for first in range(0, len(requests), AT_ONCE):
        some = requests[first : first + AT_ONCE]
        hows = [
            {"max_new_tokens": asked.tokens, "do_sample": asked.check and place % 2 == 1} for place in range(len(some))
        ]
        seeds = [{"seed": first + place} if how["do_sample"] else {} for place, how in enumerate(hows)]
        names = [manager.add_request(ids, **how, **seed) for ids, how, seed in zip(some, hows, seeds)]
        for name, ids, how, seed in zip(names, some, hows, seeds):
            result = manager.get_result(name)
            assert result.error is None
            if afterwards is not None:
                afterwards.offer(ids, result.generated_tokens)
            if asked.check:
                torch.manual_seed(seed.get("seed", 0))
                prompt = torch.tensor([ids])
                alone = model.base.generate(prompt, attention_mask=torch.ones_like(prompt), **how)
                differ += alone[0, len(ids) :].tolist() != result.generated_tokens
        while learner is not None and learner.wants and not asked.busy:
            time.sleep(0.01)
        if (done := first + AT_ONCE) % 100 == 0:
            now = metrics.tokens, metrics.finished, metrics.rows
            tokens, finished, rows = (after - then for after, then in zip(now, before))
            before, spent = now, 0.0 if learner is None else learner.spent / (learner.spent + learner.served)
            counts = {} if learner is None else {name[9:]: round(value, 3) for name, value in learner.counts().items()}
            print(f"{done - 99} to {done}: {(tokens - finished) / rows:.3f} tokens per step, {spent:.1%} of the time")
            checked = f", {differ} texts differ, {resident_mb():.0f} MB" if asked.check else ""
            print(f"    {counts}, {time.perf_counter() - begun:.0f} s{checked}", flush=True)
    manager.stop()
    if afterwards is not None:
        bound(afterwards, asked.bound)


if __name__ == "__main__":
    main()
