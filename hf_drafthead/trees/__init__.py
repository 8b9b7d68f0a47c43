"""Which draft tree: rank paths counted on the base's own text, trees grown from them, timed, the fastest kept."""
