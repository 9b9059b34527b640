"""Decoded samples in the memory of a GPU. Experimental: it has not run on a card."""
