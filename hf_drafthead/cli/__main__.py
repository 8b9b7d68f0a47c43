"""`python -m hf_drafthead.cli` is `hf-drafthead`, for launchers that want a module."""

from hf_drafthead.cli import main

main()
