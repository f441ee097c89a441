"""Looking at models: the data first, then the picture of it."""
