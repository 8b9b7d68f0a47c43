"""Which base the published heads are for whose files do not say it."""

# By repository on the Hub; what the repositories' own pages name.
BASES = {
    "yuhuili/EAGLE-Vicuna-7B-v1.3": "lmsys/vicuna-7b-v1.3",
    "yuhuili/EAGLE-Vicuna-13B-v1.3": "lmsys/vicuna-13b-v1.3",
    "yuhuili/EAGLE-Vicuna-33B-v1.3": "lmsys/vicuna-33b-v1.3",
    "yuhuili/EAGLE-llama2-chat-7B": "meta-llama/Llama-2-7b-chat-hf",
    "yuhuili/EAGLE-llama2-chat-13B": "meta-llama/Llama-2-13b-chat-hf",
    "yuhuili/EAGLE-llama2-chat-70B": "meta-llama/Llama-2-70b-chat-hf",
    "yuhuili/EAGLE-mixtral-instruct-8x7B": "mistralai/Mixtral-8x7B-Instruct-v0.1",
    "yuhuili/EAGLE-Qwen2-7B-Instruct": "Qwen/Qwen2-7B-Instruct",
    "abhigoyal/vllm-medusa-vicuna-7b-v1.3": "lmsys/vicuna-7b-v1.3",
    "yuhuili/EAGLE3-LLaMA3.1-Instruct-8B": "meta-llama/Llama-3.1-8B-Instruct",
    "jamesliu1/sglang-EAGLE3-Llama-3.1-Instruct-8B": "meta-llama/Llama-3.1-8B-Instruct",
    "yuhuili/EAGLE3-DeepSeek-R1-Distill-LLaMA-8B": "deepseek-ai/DeepSeek-R1-Distill-Llama-8B",
    "yuhuili/EAGLE3-Vicuna1.3-13B": "lmsys/vicuna-13b-v1.3",
    "yuhuili/EAGLE3-LLaMA3.3-Instruct-70B": "meta-llama/Llama-3.3-70B-Instruct",
    "lmsys/SGLang-EAGLE3-Llama-3.1-8B-Instruct-SpecForge": "meta-llama/Llama-3.1-8B-Instruct",
    "lmsys/SGLang-EAGLE3-Qwen3-30B-A3B-Instruct-2507-SpecForge-Nex": "Qwen/Qwen3-30B-A3B-Instruct-2507",
    "lmsys/SGLang-EAGLE3-Llama-3.3-70B-Instruct-SpecForge": "meta-llama/Llama-3.3-70B-Instruct",
    "zhuyksir/EAGLE3-gpt-oss-20b-bf16": "openai/gpt-oss-20b",
    "AngelSlim/Qwen3-1.7B_eagle3": "Qwen/Qwen3-1.7B",
    "AngelSlim/Qwen3-4B_eagle3": "Qwen/Qwen3-4B",
    "AngelSlim/Hunyuan-1.8B-Instruct_eagle3": "tencent/Hunyuan-1.8B-Instruct",
    "philschmid/llama-3-1-8b-instruct-medusa": "meta-llama/Llama-3.1-8B-Instruct",
    "thoughtworks/Llama-3.1-8B-Instruct-Eagle3": "meta-llama/Llama-3.1-8B-Instruct",
    "yuhuili/EAGLE-LLaMA3-Instruct-8B": "meta-llama/Meta-Llama-3-8B-Instruct",
    "yuhuili/EAGLE-LLaMA3-Instruct-70B": "meta-llama/Meta-Llama-3-70B-Instruct",
    "yuhuili/EAGLE-LLaMA3.1-Instruct-8B": "meta-llama/Llama-3.1-8B-Instruct",
    "parrishcorcoran/MedusaBitNet-2B-4T": "microsoft/bitnet-b1.58-2B-4T",
}


def base_of(repo_id: str) -> str | None:
    """The base of published heads; None if they are not known here."""
    return {name.lower(): base for name, base in BASES.items()}.get(repo_id.lower())
