"""CIFAR-10, folders of images, and the embedded patterns."""
