"""How the bundled zoo was made: text, tokenizer, base, heads and trees; `build` is the command."""
