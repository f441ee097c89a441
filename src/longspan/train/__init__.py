"""Carrying out a recipe: the loop, its optimisers, schedules and checkpoints."""
