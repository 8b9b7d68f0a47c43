"""A page in the browser: base and draft heads write side by side, and the draft tree is shown as it is walked.

`turns` lets two generations share one device fairly, `comparison` runs them, `drawing` turns what they did into HTML,
and `app` is the page itself, for which gradio must be installed (`pip install "hf-drafthead[page]"`).
"""
