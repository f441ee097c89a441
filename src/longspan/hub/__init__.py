"""The outside world: checkpoints and models that exist already."""
