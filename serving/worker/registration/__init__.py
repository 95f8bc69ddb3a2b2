"""How a worker tells gateways that it is there, where nobody has listed it."""
