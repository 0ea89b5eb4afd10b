"""Inspection: the records that describe one program, and what draws, compares and explains them."""
