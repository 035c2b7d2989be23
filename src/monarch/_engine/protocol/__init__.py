"""Decide what happens next, given an input and the time. Pure state machines."""
