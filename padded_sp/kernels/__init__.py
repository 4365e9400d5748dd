"""Triton kernels. Each module is imported when its first kernel runs on a GPU, never before."""
