"""CIFAR-10, folders of images, and generated images."""
