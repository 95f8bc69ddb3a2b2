"""OpenAI's shapes: bodies in, objects and chunks out. Begin with `requests`; a field is added there, but a
sampling parameter in `control.sampling_parameters`."""
