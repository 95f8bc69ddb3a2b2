"""Engines that serve on one card, together and apart."""
