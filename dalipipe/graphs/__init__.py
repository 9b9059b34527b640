"""What happens between the bytes of samples and a batch: decode, crop, resize, flip, normalise; bad images replaced."""
