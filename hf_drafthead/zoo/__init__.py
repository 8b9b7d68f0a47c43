"""The bundled zoo: a tiny LLaMA trained on real text, draft heads for it, and held-out prompts.

``ASSETS`` is the folder that holds them (its README says what is what), made by `benchmarks/zoo_recipe`.
"""

from pathlib import Path
from typing import Any

ASSETS: Path = Path(__file__).parent / "assets"


def path(name: str) -> str:
    """Folder of one model of the zoo, `"base"` or one of :func:`families`, to be given to ``from_pretrained``.

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


def families() -> list[str]:
    """Names of the head families that are present, in alphabetical order."""
    return sorted({config.parent.name for config in ASSETS.glob("*/config.json")} - {"base"})


def __getattr__(name: str) -> Any:
    """`chat_base` and `chat_heads`, of a module that needs transformers."""
    if name not in ("chat_base", "chat_heads"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from hf_drafthead.zoo import chat

    return getattr(chat, name)
