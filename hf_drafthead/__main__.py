"""`python -m hf_drafthead` is `hf-drafthead`, also for launchers that take a module, such as `accelerate launch -m`."""

from hf_drafthead.cli import main

main()
