"""Published checkpoints, built from their manifests: tiny ones with random numbers, sparse ones of the real size.

A manifest lists names and shapes with letters for sizes; tests/formats/published has one file per kind of heads.
"""

import json
import math
import re
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.configuration_utils import PreTrainedConfig

FOLDER = Path(__file__).parent / "published"
TINY = {"H": 32, "T": 64, "I": 48, "V": 67, "heads": 4, "layers": 2, "n": 2, "R": 4, "D": 24}
HEADER = {"float16": ("F16", b"\x00\x3c"), "bfloat16": ("BF16", b"\x80\x3f"), "float32": ("F32", b"\x00\x00\x80\x3f")}
SHARD = 10 * 10**9  # bytes, as transformers splits a model
BYTES = {"F16": 2, "BF16": 2, "F32": 4, "I64": 8, "BOOL": 1}


@dataclass(frozen=True)
class Published:
    """One published checkpoint, as its manifest has it."""

    entry: dict[str, Any]

    @property
    def repo(self) -> str:
        return self.entry["repo"]

    def sizes(self, tiny: bool) -> dict[str, Any]:
        """What the letters stand for, in a tiny copy or in the checkpoint itself."""
        real = self.entry["sizes"]
        if not tiny:
            return real
        groups = TINY["heads"] if real["heads"] == real["groups"] else 2
        head_dim = 8 if real["Q"] == real["H"] else 16  # some drafters have heads wider than H / heads
        small = real | {name: size for name, size in TINY.items() if name in real}
        small |= {"groups": groups, "Q": TINY["heads"] * head_dim, "KV": groups * head_dim, "hd": head_dim}
        if "D" in real:  # EAGLE-3 reads hidden states of several depths, some drafters by their numbers
            small["layers"] = real["layers"] if "eagle_config" in self.entry["config"] else 8
        return small | ({"D": small["V"]} if real.get("D") == real["V"] else {})

    def shapes(self, tiny: bool = False) -> dict[str, tuple[int, ...]]:
        """Every tensor of the file."""
        sizes, shapes = self.sizes(tiny), {}
        for pattern, letters in self.entry["keys"].items():
            shape = tuple(_number(letter, sizes) for letter in letters)
            shapes |= dict.fromkeys(_names(pattern, sizes), shape)
        return shapes

    def config(self, tiny: bool, base: Path | None = None) -> dict[str, Any]:
        """config.json; with another base in the place of the published one, if it names one."""
        sizes = self.sizes(tiny)
        config = _filled(self.entry["config"], sizes)
        if self.entry["layout"] == "Medusa 1.0 model":
            config = self.base_config(tiny).to_dict() | config
        if base is not None and "base_model_name_or_path" in config:
            config["base_model_name_or_path"] = str(base)
        if base is not None and "speculators_config" in config:
            config["speculators_config"]["verifier"]["name_or_path"] = str(base)
        return config

    @property
    def names_base(self) -> bool:
        """Whether the files say which base the heads are for, or hold it."""
        named = {"base_model_name_or_path", "speculators_config"} & set(self.entry["config"])
        return bool(named) or self.entry["layout"] == "Medusa 1.0 model"

    def becomes(self, tiny: bool) -> dict[str, Any]:
        """Fields of the config that the converted heads have."""
        return _filled(self.entry["becomes"], self.sizes(tiny))

    def base_config(self, tiny: bool) -> PreTrainedConfig:
        """Config of the base."""
        sizes, fields = self.sizes(tiny), dict(self.entry["base_config"])
        mixed = fields["model_type"] in ("mixtral", "gpt_oss")
        experts = {"num_local_experts": 2, "num_experts_per_tok": 2} if mixed else {}
        return AutoConfig.for_model(
            fields.pop("model_type"),
            hidden_size=sizes.get("T", sizes["H"]),
            intermediate_size=sizes["I"],
            vocab_size=sizes["V"],
            num_hidden_layers=sizes["layers"],
            num_attention_heads=sizes["T"] // 128 if "T" in sizes and not tiny else sizes["heads"],
            num_key_value_heads=sizes["groups"],
            max_position_embeddings=2048,
            initializer_range=0.25,
            tie_word_embeddings=False,
            pad_token_id=0,
            bos_token_id=1,
            eos_token_id=2,
            **experts,
            **fields,
        )

    def base(self, folder: Path) -> PreTrainedModel:
        """A tiny base with random weights, saved in the folder."""
        torch.manual_seed(1)
        base = AutoModelForCausalLM.from_config(self.base_config(tiny=True), dtype=torch.float32).eval()
        base.save_pretrained(folder)
        return base

    def tiny(self, folder: Path, base: PreTrainedModel, seed: int = 0) -> dict[str, Tensor]:
        """Write a tiny copy: the file in its own form, copies of the base's tensors equal to the base's."""
        generator = torch.Generator().manual_seed(seed)
        tensors = {name: _random(name, shape, generator) for name, shape in self.shapes(tiny=True).items()}
        own = base.state_dict()
        for name in tensors:
            if name in own and self.entry["layout"] == "Medusa 1.0 model":  # whose file holds its base as well
                tensors[name] = own[name]
            elif name in ("embed_tokens.weight", "input_embed_fn.weight") and "T" not in self.entry["sizes"]:
                tensors[name] = base.get_input_embeddings().weight.detach()
        tensors |= self.vocabulary(tiny=True)
        for pattern in self.entry.get("tied", ()):
            for head in range(self.sizes(True)["k"]):
                names = _names(pattern.replace("{k}", str(head)), self.sizes(True))
                tensors |= dict.fromkeys(names, tensors[names[0]])
        self.write_config(folder, tiny=True, base=Path(base.name_or_path))
        file = folder / self.entry["file"]
        if file.suffix == ".safetensors":
            save_file({name: tensor.clone() for name, tensor in tensors.items()}, file)
        else:
            torch.save(tensors, file)
        return tensors

    def sparse(self, folder: Path, base: Path) -> None:
        """Write files of the real size that take no space: zeros, but for the first number of every tensor."""
        self.write_config(folder, tiny=False, base=base)
        name = Path(self.entry["file"]).with_suffix(".safetensors").name
        kind, one = HEADER[self.entry["dtype"]]
        shards: list[dict[str, tuple[int, ...]]] = [{}]
        for key, shape in self.shapes().items():
            if sum(map(math.prod, shards[-1].values())) * BYTES[kind] > SHARD:
                shards.append({})
            shards[-1][key] = shape
        if len(shards) == 1:
            write_sparse(folder / name, shards[0], kind, one, self.vocabulary(tiny=False))
            return
        names = [f"model-{number + 1:05}-of-{len(shards):05}.safetensors" for number in range(len(shards))]
        for file, shapes in zip(names, shards, strict=True):
            write_sparse(folder / file, shapes, kind, one)
        places = {key: file for file, shapes in zip(names, shards, strict=True) for key in shapes}
        (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": places}))

    def vocabulary(self, tiny: bool) -> dict[str, Tensor]:
        """d2t and t2d of a draft vocabulary that is spread over the base's; nothing where there is none."""
        sizes = self.sizes(tiny)
        if "d2t" not in self.entry["keys"]:
            return {}
        places = torch.arange(sizes["D"])
        marked = torch.zeros(sizes["V"], dtype=torch.bool)
        marked[places * (sizes["V"] // sizes["D"])] = True
        return {"d2t": places * (sizes["V"] // sizes["D"]) - places, "t2d": marked}

    def write_config(self, folder: Path, tiny: bool, base: Path) -> None:
        """Write config.json."""
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.json").write_text(json.dumps(self.config(tiny, base)))


def write_sparse(
    file: Path, shapes: dict[str, tuple[int, ...]], kind: str, one: bytes, whole: dict[str, Tensor] | None = None
) -> None:
    """A safetensors file of holes, with a one at the beginning of every tensor but those that are given whole."""
    header: dict[str, Any] = {}
    whole = whole or {}
    at = 0
    for name, shape in sorted(shapes.items(), key=lambda item: item[0] not in whole):
        own = {torch.int64: "I64", torch.bool: "BOOL"}[whole[name].dtype] if name in whole else kind
        end = at + math.prod(shape) * BYTES[own]
        header[name] = {"dtype": own, "shape": list(shape), "data_offsets": [at, end]}
        at = end
    head = json.dumps(header).encode()
    with open(file, "wb") as opened:
        opened.write(struct.pack("<Q", len(head)) + head)
        start = opened.tell()
        for name, about in header.items():
            opened.seek(start + about["data_offsets"][0])
            opened.write(whole[name].numpy().tobytes() if name in whole else one)
        opened.truncate(start + at)


def published(*kinds: str) -> list[Published]:
    """The checkpoints of these kinds of heads."""
    files = [json.loads((FOLDER / f"{kind}.json").read_text()) for kind in kinds]
    return [Published(entry) for file in files for entry in file["checkpoints"] if "keys" in entry]


ALL = published(*sorted(path.stem for path in FOLDER.glob("*.json")))


def _names(pattern: str, sizes: dict[str, Any]) -> list[str]:
    names = [pattern]
    for letter in re.findall(r"{(\w)}", pattern):
        places = sizes[letter] if isinstance(sizes[letter], list) else range(sizes[letter])
        names = [name.replace(f"{{{letter}}}", str(place)) for name in names for place in places]
    return names


def _number(letters: str, sizes: dict[str, Any]) -> int:
    found = re.fullmatch(r"(\d*)(\w+)", letters)
    return int(found[1] or 1) * sizes[found[2]]


def _filled(fields: dict[str, Any], sizes: dict[str, Any]) -> dict[str, Any]:
    """The config with numbers in the place of letters."""
    return {
        name: _filled(value, sizes)
        if isinstance(value, dict)
        else sizes.get(value, value)
        if isinstance(value, str)
        else value
        for name, value in fields.items()
    }


def _random(name: str, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    noise = torch.randn(shape, generator=generator)
    return 1 + 0.2 * noise if "norm" in name else noise * 1.5 * max(shape[-1], 8) ** -0.5
