"""Chat templates of many styles, each with what it lets the assistant say; and tokenizers of several kinds."""

from collections.abc import Callable
from dataclasses import dataclass

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from tests.checkpoints import byte_tokenizer

VICUNA = (
    "{%- if messages[0]['role'] == 'system' -%}{%- set system_message = messages[0]['content'] -%}"
    "{%- set turns = messages[1:] -%}{%- else -%}{%- set system_message = 'A chat.' -%}{%- set turns = messages -%}"
    "{%- endif -%}{{- bos_token + system_message + ' ' -}}{%- for message in turns -%}"
    "{%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) -%}"
    "{{- raise_exception('Conversation roles must alternate') -}}{%- endif -%}{%- if message['role'] == 'user' -%}"
    "{{- 'USER: ' + message['content'] + ' ' -}}{%- else -%}{{- 'ASSISTANT: ' -}}{%- generation -%}"
    "{{- message['content'] + eos_token -}}{%- endgeneration -%}{%- endif -%}{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- 'ASSISTANT:' -}}{%- endif -%}"
)
CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' }}{{ m['content'] + '<|im_end|>' }}{{ '\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
CHATML_MARKED = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' }}{% if m['role'] == 'assistant' %}{% generation %}"
    "{{ m['content'] + '<|im_end|>' }}{% endgeneration %}{% else %}{{ m['content'] + '<|im_end|>' }}{% endif %}"
    "{{ '\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
# the tag stands in a macro: there transformers counts its characters from the macro's own beginning
MARKED_IN_A_MACRO = (
    "{% macro say(words) %}{% generation %}{{ words + '<|im_end|>' }}{% endgeneration %}{% endmacro %}"
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' }}{% if m['role'] == 'assistant' %}"
    "{{ say(m['content']) }}{% else %}{{ m['content'] + '<|im_end|>' }}{% endif %}{{ '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
STRIPPING = (  # and no role for the system, and an end of turn behind a space
    "{% for m in messages %}{% if m['role'] == 'system' %}{{ raise_exception('no system') }}{% endif %}"
    "{% if m['role'] == 'user' %}{{ bos_token + '[INST] ' + m['content'] | trim + ' [/INST]' }}"
    "{% else %}{{ ' ' + m['content'] | trim + ' ' + eos_token }}{% endif %}{% endfor %}"
)
THINKING = (  # leaves the thoughts of earlier answers out, and puts empty ones into the last
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' }}{% if m['role'] == 'assistant' %}"
    "{% set words = m['content'].split('</think>')[-1].lstrip('\n') %}"
    "{% if loop.last %}{{ '<think>\n' + (m['content'].split('</think>')[0].split('<think>')[-1].strip('\n') "
    "if '</think>' in m['content'] else '') + '\n</think>\n\n' }}{% endif %}{{ words }}"
    "{% else %}{{ m['content'] }}{% endif %}{{ '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
THINKING_PROMPT = (  # the generation prompt holds more than the answers of the past show
    "{% for m in messages %}{% if m['role'] == 'user' %}{{ '<|im_start|>' + m['content'] }}{% else %}"
    "{{ '<|im_end|>' + m['content'] + eos_token }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_end|><think>\n' }}{% endif %}"
)
TOOL_TEMPLATE = (  # which knows tools, and leaves earlier thoughts out
    "{% if tools %}{{ tools | tojson }}{% endif %}{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' }}"
    "{% if m.reasoning_content and loop.last %}{{ '<think>' + m.reasoning_content + '</think>' }}{% endif %}"
    "{{ m['content'] }}{% for call in m.tool_calls %}{{ '<call>' + call.function | tojson }}{% endfor %}"
    "{{ '<|im_end|>\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
WITHOUT_END = (
    "{% for m in messages %}{{ m['role'] | capitalize + ': ' + m['content'] + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'Assistant:' }}{% endif %}"
)
WITHOUT_PROMPT = "{% for m in messages %}{{ m['role'] + ': ' + m['content'] + eos_token + '\n' }}{% endfor %}"
END_AT_THE_END = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + ' ' + m['content'] }}{% if loop.last and "
    "m['role'] == 'assistant' %}{{ eos_token }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant' }}{% endif %}"
)


@dataclass(frozen=True)
class Style:
    """A template, and of a chat's answers what is the assistant's, as a person reads it off the template."""

    template: str
    said: Callable[[list[str]], list[str]]


def each(before: str, after: str, change: Callable[[str], str] = lambda words: words) -> Callable:
    return lambda answers: [before + change(words) + after for words in answers]


def last_thinks(answers: list[str]) -> list[str]:
    *earlier, last = answers
    said = [words.lstrip("\n") + "<|im_end|>" for words in earlier]
    return [*said, f"<think>\n\n</think>\n\n{last}<|im_end|>"]


STYLES = {
    "vicuna": Style(VICUNA, each(" ", "</s>")),  # the generation prompt ends in front of the space
    "chatml": Style(CHATML, each("", "<|im_end|>")),
    "chatml with marks": Style(CHATML_MARKED, each("", "<|im_end|>")),
    "marks in a macro": Style(MARKED_IN_A_MACRO, each("", "<|im_end|>")),
    "stripping": Style(STRIPPING, each(" ", " </s>", str.strip)),
    "thinking": Style(THINKING, last_thinks),
    "thinking prompt": Style(THINKING_PROMPT, each("", "</s>")),
    "without end of turn": Style(WITHOUT_END, each(" ", "")),
    "without generation prompt": Style(WITHOUT_PROMPT, each("", "</s>")),
    "end at the end": Style(END_AT_THE_END, lambda answers: [*(f" {w}" for w in answers[:-1]), f" {answers[-1]}</s>"]),
}
SPECIAL = ["<|im_start|>", "<|im_end|>"]
WORDS = "the cat sat on the mat and the dog sat too\n\nuser assistant system: A chat. What? Why? Because, that is so.\n"


def single_bytes() -> PreTrainedTokenizerFast:
    return byte_tokenizer()


def merged_bytes(trimmed: bool = False) -> PreTrainedTokenizerFast:
    """Byte-level BPE; trimmed: its offsets leave the white space out, as those of GPT-2 do."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    if trimmed:
        tokenizer.post_processor = processors.ByteLevel(trim_offsets=True)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=360, special_tokens=["<pad>", "<s>", "</s>"], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator([WORDS] * 9, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", pad_token="<pad>")


def metaspace() -> PreTrainedTokenizerFast:
    """As LLaMA's: a space is a part of the word behind it, unknown characters fall into bytes, texts begin with <s>."""
    bytes_ = [f"<0x{byte:02X}>" for byte in range(256)]
    merged = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>"))
    merged.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never", split=False)
    trainer = trainers.BpeTrainer(
        vocab_size=460, special_tokens=["<pad>", "<s>", "</s>", "<unk>", *bytes_], show_progress=False
    )
    merged.train_from_iterator([WORDS.replace("\n", " ")] * 9, trainer)
    merged.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace(prepend_scheme="never")])
    merged.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return PreTrainedTokenizerFast(
        tokenizer_object=merged, bos_token="<s>", eos_token="</s>", pad_token="<pad>", unk_token="<unk>"
    )


TOKENIZERS: dict[str, Callable[[], PreTrainedTokenizerFast]] = {
    "bytes": single_bytes,
    "merged": merged_bytes,
    "trimmed": lambda: merged_bytes(trimmed=True),
    "metaspace": metaspace,
}


def tokenizer_with(template: str | None, kind: str = "bytes") -> PreTrainedTokenizerFast:
    """A tokenizer of a kind that knows a template and its special tokens."""
    tokenizer = TOKENIZERS[kind]()
    tokenizer.add_special_tokens({"additional_special_tokens": SPECIAL}, replace_extra_special_tokens=False)
    tokenizer.chat_template = template
    return tokenizer


def bytes_of(tokenizer: PreTrainedTokenizerFast, ids: list[int]) -> list[bytes]:
    """What each token says, without asking the tokenizer for offsets."""
    back = {symbol: byte for byte, symbol in _byte_symbols().items()}
    special = set(tokenizer.get_added_vocab())
    said = []
    for token in tokenizer.convert_ids_to_tokens(ids):
        if token.startswith("<0x") and len(token) == 6:
            said.append(bytes([int(token[3:5], 16)]))
        elif token in special:
            said.append(token.encode())
        elif "metaspace" in str(tokenizer.backend_tokenizer.pre_tokenizer).lower():
            said.append(token.replace("▁", " ").encode())
        else:
            said.append(bytes(back[symbol] for symbol in token))
    return said


def _byte_symbols() -> dict[int, str]:
    """GPT-2's table: printable bytes are themselves, the others come behind 255 in order."""
    printable = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAC + 1), *range(0xAE, 0xFF + 1)]
    rest = [byte for byte in range(256) if byte not in printable]
    return {byte: chr(byte) for byte in printable} | {byte: chr(256 + place) for place, byte in enumerate(rest)}
