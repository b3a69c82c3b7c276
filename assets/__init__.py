"""The demo model that ships with Headrace, and everything needed to rebuild it."""
