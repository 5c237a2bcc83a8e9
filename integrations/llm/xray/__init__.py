"""What a run did stage by stage, and where two runs part."""
