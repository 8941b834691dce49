"""Train models from recipes, in one or more processes, with runs that can be resumed."""
