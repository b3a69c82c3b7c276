"""Triton kernels, one operation a file; what they are measured by are the references, in the folder above."""
