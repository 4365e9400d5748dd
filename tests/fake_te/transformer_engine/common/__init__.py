"""What the double's frameworks share: recipes."""
