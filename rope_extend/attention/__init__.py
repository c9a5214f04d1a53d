"""What acts inside attention: rotation that follows the length, biases, and linear attention."""
