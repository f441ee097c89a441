"""Examples into batches, heads with their losses, and measures of success."""
