"""What a model folder holds besides tokens: tensors, config.json, generation_config.json; every fault names its file.

Begin with `checkpoint`. Which family a config.json describes is `models.registry`'s to say.
"""
