"""How the embedded model was made: texts, training, export, measures. Begin with README.md."""
