"""Token rows: every rank holds the whole model and computes some rows of each chunk of a prompt."""
