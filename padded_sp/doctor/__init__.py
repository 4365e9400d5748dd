"""What this machine has, what is known to go wrong on it, and whether its numbers are right.

Text and figures; ``python -m padded_sp doctor`` prints them.
"""
