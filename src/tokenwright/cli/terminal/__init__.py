"""Output, interrupts and figures in a terminal."""
