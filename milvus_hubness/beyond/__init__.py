"""Fits and biases over a gallery that is too large for one machine, on Ray."""

from milvus_hubness.beyond.ray_gallery import RayGallery
from milvus_hubness.beyond.shard_steps import Shard

__all__ = ["RayGallery", "Shard"]
