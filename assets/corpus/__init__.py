"""Templates and word lists from which the demo model's training text is generated."""
