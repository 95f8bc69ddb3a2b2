"""What is let in of requests and by how much, before anything is made of it. Begin with `bounds`."""
