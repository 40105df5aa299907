"""Fits and biases on Ray, for galleries that are too large for one machine."""

from milvus_hubness.distributed.ray_gallery import RayBiases, RayGallery, Shard, fit_on_ray

__all__ = ["RayBiases", "RayGallery", "Shard", "fit_on_ray"]
