"""Vision towers: run over pixels, and a bounded memory of what they give."""
