"""Output, interrupts and help in a terminal."""
