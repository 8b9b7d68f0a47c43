"""A page in the browser: heads and base continue one prompt, each guess in the colour of its depth.

Gradio must be installed (`pip install "hf-drafthead[page]"`).
"""
