"""Judging a router on a table of outcomes: no model and no I/O, numpy only."""
