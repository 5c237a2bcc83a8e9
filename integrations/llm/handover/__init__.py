"""Prefill here, decode there: one rank computes prompts and hands keys and values over to another, which decodes."""
