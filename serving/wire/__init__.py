"""Messages of the cluster as what the control plane takes, and back. Everything that comes in is checked here."""
