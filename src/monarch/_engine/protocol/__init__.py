"""Pure state machines: they decide what happens next, given an input and the time."""
