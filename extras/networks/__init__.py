"""Networks for images, sequences and sets of ids."""
