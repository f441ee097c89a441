"""The demo: a short model made long reads a document and answers questions about it."""
