"""Files of others are refused in one line; nothing in them is executed or unpickled."""

import json
import struct
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from hf_drafthead.modeling import MedusaConfig, MedusaForCausalLM
from hf_drafthead.modeling.config import sub_config
from tests.modeling import hostile

# peft asks for it
pytestmark = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")

LOADERS = {"own class": MedusaForCausalLM.from_pretrained, "AutoModel": AutoModel.from_pretrained}


@pytest.fixture(scope="module")
def good(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("good")
    hostile.good_checkpoints(folder)
    return folder


def refusal(load, path: Path) -> str:
    """The one line with which a checkpoint is refused."""
    with pytest.raises((OSError, TypeError, ValueError)) as caught:
        load(path)
    message = str(caught.value)
    assert "\n" not in message and message.endswith(".") and len(message.replace(str(path), "")) < 500, message
    return message


@pytest.mark.parametrize("name", hostile.GOOD)
def test_the_good_checkpoints_are_loaded(good, name):
    for load in LOADERS.values():
        assert load(good / name).config.num_draft_heads == 2
    assert hostile.info(good / name) == (0, "")


def described_or_refused(path: Path) -> tuple[int, str]:
    """What `info` says of a checkpoint: all that it can tell, or one line."""
    code, errors = hostile.info(path)
    one_line = errors.startswith("hf-drafthead: ") and errors.count("\n") == 1 and len(errors) < 800
    assert code == 0 or (code == 2 and one_line), errors
    return code, errors


@pytest.mark.few(6)
@pytest.mark.parametrize("case", hostile.CASES)
def test_a_hostile_checkpoint_is_refused_in_one_line(good, tmp_path, case):
    source, change, message = hostile.CASES[case]
    path = hostile.changed(good, tmp_path, source, change)
    for load in LOADERS.values():
        assert message.replace("{}", str(path)) in refusal(load, path)
    described_or_refused(path)


@pytest.mark.parametrize("case", hostile.CONFIG_FILES)
def test_a_config_that_is_none_is_refused_in_one_line(good, tmp_path, case):
    content, said = hostile.CONFIG_FILES[case]
    (tmp_path / "config.json").write_text(content)
    assert said in refusal(MedusaForCausalLM.from_pretrained, tmp_path)
    code, errors = described_or_refused(tmp_path)
    assert code == 2 and said in errors


# ---- nothing is executed --------------------------------------------------------------------------------------------

EVIL = """
from pathlib import Path
from transformers import LlamaConfig, LlamaForCausalLM
Path({mark!r}).touch()
class Config(LlamaConfig):
    pass
class Model(LlamaForCausalLM):
    pass
"""
AUTO_MAP = {"AutoConfig": "evil.Config", "AutoModel": "evil.Model", "AutoModelForCausalLM": "evil.Model"}


@pytest.mark.parametrize("trust", [None, False, True])
@pytest.mark.parametrize("where", ["top", "base_config", "both"])
@pytest.mark.parametrize("source", ["heads", "whole"])
def test_code_beside_heads_never_runs_whatever_the_user_trusts(good, tmp_path, monkeypatch, source, where, trust):
    """`trust_remote_code=True` is said of the base: the families of heads are known here."""
    monkeypatch.setenv("HF_MODULES_CACHE", str(tmp_path / "modules"))
    path = hostile.changed(good, tmp_path, source)
    mark = tmp_path / "it ran"
    (path / "evil.py").write_text(EVIL.format(mark=str(mark)))
    if where in ("top", "both"):
        hostile.config(auto_map=AUTO_MAP)(path)
    if where in ("base_config", "both"):
        hostile.config(base_config__auto_map=AUTO_MAP)(path)
    trusted = {} if trust is None else {"trust_remote_code": trust}
    assert isinstance(AutoConfig.from_pretrained(path, **trusted), MedusaConfig)
    for load in (AutoModel, AutoModelForCausalLM, MedusaForCausalLM):
        assert isinstance(load.from_pretrained(path, **trusted), MedusaForCausalLM)
    assert hostile.info(path)[0] == 0
    assert not mark.exists()


def test_an_unknown_base_inside_a_checkpoint_is_refused_before_its_code_is_asked_for(good, tmp_path, monkeypatch):
    def asked(*_):
        raise AssertionError("the user was asked to run code")

    monkeypatch.setattr("builtins.input", asked)
    path = hostile.changed(good, tmp_path, *hostile.CASES["an unknown base inside"][:2])
    mark = tmp_path / "it ran"
    (path / "evil.py").write_text(EVIL.format(mark=str(mark)))
    hostile.config(base_config__auto_map=AUTO_MAP)(path)
    for trust in (None, True):
        for load in LOADERS.values():
            message = refusal(lambda path, load=load, trust=trust: load(path, trust_remote_code=trust), path)
            assert "(model type evil)" in message or "cannot be built from its config" in message
    assert not mark.exists()


@pytest.mark.parametrize("source", ["heads", "whole"])
def test_heads_do_not_choose_the_code_that_computes_attention(good, tmp_path, source):
    path = hostile.changed(good, tmp_path, source)
    names = ("attn_implementation", "_attn_implementation", "_attn_implementation_internal", "experts_implementation")
    hostile.config(**dict.fromkeys(names, "evil/kernel"))(path)
    hostile.config(**{f"base_config__{name}": "evil/kernel" for name in names})(path)
    for load in LOADERS.values():
        assert load(path).base.config._attn_implementation == "sdpa"
        assert load(path, attn_implementation="eager").base.config._attn_implementation == "eager"


class Loud:
    def __init__(self, mark: Path):
        self.mark = mark

    def __reduce__(self):
        return Path.touch, (self.mark,)


def test_pickles_are_never_opened(good, tmp_path):
    path = hostile.changed(good, tmp_path, *hostile.CASES["an adapter as pickle"][:2])
    mark = tmp_path / "it ran"
    for name in ("adapter_model.bin", "pytorch_model.bin", "training_args.bin"):
        torch.save(Loud(mark), path / name)
    for load in LOADERS.values():
        refusal(load, path)
    (path / "adapter_config.json").unlink()
    (path / "model.safetensors").unlink()
    for load in LOADERS.values():
        assert "(a pickle such as pytorch_model.bin is never opened" in refusal(load, path)
    assert not mark.exists()


def test_what_info_prints_does_not_steer_the_terminal(good, tmp_path, capsys):
    path = hostile.changed(good, tmp_path, "heads", hostile.config(base_model_name_or_path="a\x1b[2J\r\nb"))
    with pytest.raises(SystemExit):
        hostile.main(["info", str(path)])
    written = capsys.readouterr().out
    assert "\x1b" not in written and "\r" not in written and "a\\x1b[2J\\r\\nb" in written


# ---- no model of transformers is refused for its fields -------------------------------------------------------------


@pytest.mark.parametrize("model_type", sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES))
def test_every_base_of_transformers_is_within_the_limits(model_type):
    try:
        fields = CONFIG_MAPPING[model_type]().to_dict()
        CONFIG_MAPPING[model_type].from_dict(dict(fields))
    except Exception:  # some configs have no defaults; that of DBRX in transformers 5.17 does not read its own fields
        pytest.skip("needs arguments")
    assert sub_config("base_config", fields).model_type == CONFIG_MAPPING[model_type].model_type


# ---- fuzzing --------------------------------------------------------------------------------------------------------

VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-3, 5)
    | st.sampled_from([2**31, -(2**63), 10**30, 0.5, -1e300, float("nan"), float("inf")])
    | st.sampled_from(["", "x", "../base", "float16", "llama", "drafthead_hydra", "sdpa", "\x00", "\ud800"]),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["", "a", "0", "type"]), inner, max_size=3)
    ),
    max_leaves=6,
)


@pytest.fixture(autouse=True)
def no_deprecated_use_of_transformers():
    """Not here: a fuzzed field may be one that transformers deprecates."""


def quietly(path: Path) -> None:
    """Loaded, or refused in one line; the same on the command line."""
    for load in LOADERS.values():
        try:
            load(path)
        except (OSError, TypeError, ValueError) as error:
            message = str(error)
            assert "\n" not in message and len(message) < 800, message
    described_or_refused(path)


def quietly_with(file: Path, content: bytes) -> None:
    """The same while one of a checkpoint's files has another content."""
    good = file.read_bytes()
    try:
        file.write_bytes(content)
        quietly(file.parent)
    finally:
        file.write_bytes(good)


@pytest.fixture(scope="module")
def fuzzed(good, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("fuzzed")
    (folder / "base").symlink_to(good / "base")
    for name in ("heads", "whole"):
        hostile.changed(good, folder, name).rename(folder / name)
    return folder


FUZZ = settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@FUZZ
@given(data=st.data())
def test_any_fields_in_a_config_are_used_or_refused(fuzzed, data):
    path = fuzzed / data.draw(st.sampled_from(["heads", "whole"]))
    fields = json.loads((path / "config.json").read_text())
    inner = fields["base_config"]
    for _ in range(data.draw(st.integers(1, 3))):
        place = data.draw(st.sampled_from([fields, inner]))
        names = [*place, "dtype", "num_labels", "auto_map", "rope_scaling", "quantization_config", "layer_config", "x"]
        name = data.draw(st.sampled_from([name for name in names if name != "model_type"]))
        place[name] = data.draw(VALUES)
    quietly_with(path / "config.json", json.dumps(fields).encode())


@pytest.mark.slow
@FUZZ
@given(data=st.data())
def test_any_generation_settings_are_used_or_refused(fuzzed, data):
    path = fuzzed / data.draw(st.sampled_from(["heads", "whole"]))
    file = path / "generation_config.json"
    names = ["draft_tree", "acceptance", "posterior_threshold", "posterior_alpha", "calibration", "x"]
    names += ["eos_token_id", "max_length", "temperature", "cache_implementation", "suppress_tokens", "stop_strings"]
    changes = data.draw(st.dictionaries(st.sampled_from(names), VALUES, min_size=1, max_size=3))
    quietly_with(file, json.dumps(json.loads(file.read_text()) | changes).encode())


@FUZZ
@given(data=st.data())
def test_any_bytes_in_the_weights_are_loaded_or_refused(fuzzed, data):
    path = fuzzed / data.draw(st.sampled_from(["heads", "whole"]))
    file = path / "model.safetensors"
    good = file.read_bytes()
    (length,) = struct.unpack("<Q", good[:8])
    header, tensors = json.loads(good[8 : 8 + length]), good[8 + length :]
    numbers = st.integers(-1, 4) | st.sampled_from([2**31, 2**62, len(tensors), len(tensors) - 4])
    match data.draw(st.sampled_from(["bytes", "cut", "entry"])):
        case "bytes":
            at = data.draw(st.integers(0, 8 + length))
            changed = good[:at] + data.draw(st.binary(min_size=1, max_size=4)) + good[at + 1 :]
        case "cut":
            changed = good[: data.draw(st.integers(0, len(good)))]
        case _:
            name = data.draw(st.sampled_from(sorted(header)))
            changes = {
                "dtype": st.sampled_from(["F32", "F64", "BF16", "I8", "F8_E4M3", "F4", "BOOL", "XX", "", 7]),
                "shape": st.lists(numbers, max_size=4) | numbers,
                "data_offsets": st.lists(numbers, max_size=3) | numbers,
            }
            field = data.draw(st.sampled_from(sorted(changes)))
            header[name] = dict(header[name]) | {field: data.draw(changes[field])}
            head = json.dumps(header).encode()
            changed = struct.pack("<Q", len(head)) + head + tensors
    quietly_with(file, changed)
