"""`hostring serve`: an OpenAI-compatible endpoint in front of a group of ranks.

The head rank has the requests. Its HTTP server runs in a thread (`http`), and hands requests to the `Scheduler`. All
ranks run one loop of steps (`loop`); the head says in the answer of each step what the next one does (`steps`).
"""
