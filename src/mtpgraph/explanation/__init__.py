"""``mtpgraph.explain`` and ``mtpgraph explain``: how a step compiles, by the lines of the user."""
