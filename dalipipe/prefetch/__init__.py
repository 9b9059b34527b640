"""The moving window over the order: the blocks of the next steps are near before anybody asks for them."""
