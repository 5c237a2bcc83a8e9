"""Speculative decoding: the head guesses the next tokens, and one step of all ranks checks the guesses.

A guess comes from the text so far (`lookup`) or from a small model on the head (`draft`). A step feeds the last token
and the guesses as rows of one sequence, and the head chooses a token after each row as it would without guesses. It
goes on while its choice is the guess. So the text is the one that comes without guesses, for greedy and for sampled
choices, as long as rows of one step have the logits that they have alone. Those of packed ranks have, bit for bit.

How many guesses a step has follows from measured times and hits (`depth`).
"""
