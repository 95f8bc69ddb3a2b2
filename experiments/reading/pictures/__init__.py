"""What notebooks and reports draw."""
