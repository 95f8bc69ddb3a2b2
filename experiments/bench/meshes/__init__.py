"""What meshes cost. Begin with `measure`."""
