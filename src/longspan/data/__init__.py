"""Reading text, and cutting it into what a step of training takes."""
