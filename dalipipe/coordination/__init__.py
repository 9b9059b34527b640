"""What ranks agree on before they load: who sits on which slots of the global batch."""
