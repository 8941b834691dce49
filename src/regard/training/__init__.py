"""Recipes, the training loop, processes, and runs that survive being killed."""
