"""A model folder's tensors, config.json and generation_config.json. Every fault names its file.

Which family a config.json describes is decided in `models.registry`; what the tensors mean, in the family's folder;
tokenizer files are read in `models.tokenizers`.
Begin with `checkpoint`; `known` has what config.json says of models that are known by name.
"""
