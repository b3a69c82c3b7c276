"""One operation a file: its plain torch reference, and beside it the faster ways to compute the same.

`backend.open_backend` gives the set of operations for a device; everything above calls only that.
"""
