"""What models do with long text, as numbers to look at."""
