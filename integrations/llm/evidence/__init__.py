"""`hostring evidence`: a run, what it cost beside what one machine does alone, and whether it is what it claims."""
