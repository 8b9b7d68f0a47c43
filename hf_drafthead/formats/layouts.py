"""The layouts that are known, which of them a checkpoint is in, and the bases of published heads that name none."""

from collections.abc import Mapping
from typing import Any

from hf_drafthead.formats.dflash import BlockDrafter, BlockDrafter2, SpeculatorsBlock, SpeculatorsBlock2
from hf_drafthead.formats.disk import Source, find_sources
from hf_drafthead.formats.eagle import Eagle
from hf_drafthead.formats.eagle3 import Eagle3, PEagle
from hf_drafthead.formats.gemma4_assistant import GemmaAssistant
from hf_drafthead.formats.gguf import gguf_source
from hf_drafthead.formats.hydra import Hydra
from hf_drafthead.formats.layout import KIND, Layout
from hf_drafthead.formats.medusa import Medusa, MedusaFull, MedusaVllm
from hf_drafthead.formats.mtp_layouts import BaseModules, SpeculatorsMtp
from hf_drafthead.formats.speculators import Speculators, SpeculatorsPEagle
from hf_drafthead.modeling.base_model import split_gguf
from hf_drafthead.modeling.config import MODEL_TYPE_PREFIX

LAYOUTS: list[Layout] = [Medusa(), MedusaFull(), MedusaVllm(), Hydra(), Eagle(), Eagle3(), PEagle(), Speculators()]
LAYOUTS += [SpeculatorsPEagle(), SpeculatorsMtp(), BaseModules(), BlockDrafter(), BlockDrafter2(), SpeculatorsBlock()]
LAYOUTS += [SpeculatorsBlock2(), GemmaAssistant()]
OWN_PREFIXES = ("drafter.", "base.")  # names of this library


def targets() -> list[str]:
    """What `export --to` takes."""
    return sorted({target for layout in LAYOUTS for target in layout.targets})


def find(name: str, hub: Mapping[str, Any]) -> tuple[Source, Layout]:
    """The weights at a folder, file or Hub id, and their layout, which must be one that is known (ValueError)."""
    sources = find_sources(name, hub) if split_gguf(name)[1] is None else [gguf_source(name, hub)]
    matches = [
        (source, layout)
        for source in sources
        if (layout := next((each for each in LAYOUTS if each.detect(source.tensors, source.config)), None)) is not None
    ]
    if len(matches) > 1:
        names = " and ".join(f"{source.files[0]!r} ({layout.name})" for source, layout in matches)
        raise ValueError(f"{name!r} holds heads twice: {names}; give the file of one of them.")
    if matches:
        return matches[0]
    keys = [key for source in sources for key in source.tensors]
    ours = str(sources[0].config.get("model_type", "")).startswith(MODEL_TYPE_PREFIX)
    if ours or all(key.startswith(OWN_PREFIXES) for key in keys):
        raise ValueError(f"{name!r} is a checkpoint of this library already: load it with AutoModel.from_pretrained.")
    shown = ", ".join(repr(key) for key in sorted(keys)[:3])
    what = f"is of no known layout: it has {len(keys)} tensors such as {shown}"
    known = ", ".join(layout.name for layout in LAYOUTS)
    if (kind := sources[0].config.get(KIND)) is not None:
        what = f"holds a speculator of the kind {kind!r}"
        known = ", ".join(name for layout in LAYOUTS for name in layout.kinds)
    advice = "give one of these; a base without heads needs no conversion, put new heads on it with from_base"
    raise ValueError(f"{name!r} {what}; known are {known}: {advice}.")


# What the repositories' own pages name: theirs and the base's, {} standing for each of the sizes.
PUBLISHED = """
yuhuili/EAGLE-Vicuna-{}B-v1.3 lmsys/vicuna-{}b-v1.3 7 13 33
yuhuili/EAGLE-llama2-chat-{}B meta-llama/Llama-2-{}b-chat-hf 7 13 70
yuhuili/EAGLE-mixtral-instruct-8x7B mistralai/Mixtral-8x7B-Instruct-v0.1
yuhuili/EAGLE-Qwen2-7B-Instruct Qwen/Qwen2-7B-Instruct
yuhuili/EAGLE-LLaMA3-Instruct-{}B meta-llama/Meta-Llama-3-{}B-Instruct 8 70
yuhuili/EAGLE-LLaMA3.1-Instruct-8B meta-llama/Llama-3.1-8B-Instruct
abhigoyal/vllm-medusa-vicuna-7b-v1.3 lmsys/vicuna-7b-v1.3
philschmid/llama-3-1-8b-instruct-medusa meta-llama/Llama-3.1-8B-Instruct
yuhuili/EAGLE3-LLaMA3.1-Instruct-8B meta-llama/Llama-3.1-8B-Instruct
yuhuili/EAGLE3-DeepSeek-R1-Distill-LLaMA-8B deepseek-ai/DeepSeek-R1-Distill-Llama-8B
yuhuili/EAGLE3-Vicuna1.3-13B lmsys/vicuna-13b-v1.3
yuhuili/EAGLE3-LLaMA3.3-Instruct-70B meta-llama/Llama-3.3-70B-Instruct
jamesliu1/sglang-EAGLE3-Llama-3.1-Instruct-8B meta-llama/Llama-3.1-8B-Instruct
lmsys/SGLang-EAGLE3-Llama-{}B-Instruct-SpecForge meta-llama/Llama-{}B-Instruct 3.1-8 3.3-70
lmsys/SGLang-EAGLE3-Qwen3-30B-A3B-Instruct-2507-SpecForge-Nex Qwen/Qwen3-30B-A3B-Instruct-2507
zhuyksir/EAGLE3-gpt-oss-20b-bf16 openai/gpt-oss-20b
AngelSlim/Qwen3-{}B_eagle3 Qwen/Qwen3-{}B 1.7 4
AngelSlim/Hunyuan-1.8B-Instruct_eagle3 tencent/Hunyuan-1.8B-Instruct
thoughtworks/Llama-3.1-8B-Instruct-Eagle3 meta-llama/Llama-3.1-8B-Instruct
z-lab/Qwen3-{}B-DFlash-b16 Qwen/Qwen3-{}B 4 8
deepseek-ai/dflash_qwen3_{}b Qwen/Qwen3-{}B 4 8 14
deepseek-ai/dspark_qwen3_{}b Qwen/Qwen3-{}B 4 8 14
google/gemma-4-{}-it-assistant google/gemma-4-{}-it E2B E4B 12B 26B-A4B 31B
"""
LINES = (line.split() for line in PUBLISHED.split("\n") if line)
BASES = {name.format(size): base.format(size) for name, base, *sizes in LINES for size in sizes or ("",)}
