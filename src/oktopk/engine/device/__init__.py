"""Steps that never leave the device of the gradients."""
