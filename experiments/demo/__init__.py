"""`moonshard demo`. Begin with `script`."""
