"""AN4 and other recorded speech: audio, features, labels, manifests."""
