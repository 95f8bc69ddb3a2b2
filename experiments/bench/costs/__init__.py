"""What parts cost by themselves: gateway, router, recording, rows."""
