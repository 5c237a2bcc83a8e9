"""Sends parts of files from the head of a group to ranks that lack them: authenticated, hashed, resumed, and cached."""
