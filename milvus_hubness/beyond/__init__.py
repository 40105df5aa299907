"""Fits and biases over a gallery that is too large for one machine, on Ray."""

from milvus_hubness.beyond.ray_engine import RayBiases, fit_on_ray
from milvus_hubness.beyond.ray_gallery import RayGallery
from milvus_hubness.beyond.shard_steps import Shard

__all__ = ["RayBiases", "RayGallery", "Shard", "fit_on_ray"]
