"""What commands look at before they start processes."""
