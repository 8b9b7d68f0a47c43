"""The bundled zoo: a tiny LLaMA trained on real text, draft heads for it, and held-out prompts.

``ASSETS`` is the folder that holds them (its README says what is what), made by `benchmarks/zoo_recipe`.
"""

from pathlib import Path

ASSETS: Path = Path(__file__).parent / "assets"


def path(name: str) -> str:
    """Folder of one model of the zoo, to be given to ``from_pretrained``.

    Args:
        name: ``"base"`` or one of :func:`families`.

    Raises:
        ValueError: the zoo holds no such model.
    """
    folder = ASSETS / name
    if not (folder / "config.json").is_file():
        raise ValueError(
            f"the zoo holds no model {name!r}: expected one of {', '.join(['base', *families()])}; "
            "`python -m benchmarks.zoo_recipe.build --part NAME` builds one in a checkout."
        )
    return str(folder)


def chat_base() -> str:
    """Folder of the chat model, SmolLM2-135M-Instruct; `hf_drafthead.zoo.chat` has the details."""
    from hf_drafthead.zoo.chat import chat_base  # which needs transformers

    return chat_base()


def chat_heads(family: str) -> str:
    """Folder of the chat model with heads of one family; `hf_drafthead.zoo.chat` has the details."""
    from hf_drafthead.zoo.chat import chat_heads

    return chat_heads(family)


def families() -> list[str]:
    """Names of the head families that are present, in alphabetical order."""
    folders = (config.parent for config in ASSETS.glob("*/config.json"))
    return sorted(folder.name for folder in folders if folder.name != "base")
