"""What our figures stand beside, and the checkpoint that all are asked."""
