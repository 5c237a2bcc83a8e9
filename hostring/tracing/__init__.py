"""The flight recorders of several ranks on one time line, and what they say together.

`clocks` compares the ranks' clocks, `timeline` puts their calls side by side, `culprits` names the rank behind each
delay, and the critical path.
"""
