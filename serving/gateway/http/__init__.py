"""The HTTP front and what holds for every exchange. Begin with `front`, the routes, and `edge`."""
