"""Fits and biases on Ray, for galleries that are too large for one machine; the engine "ray" of
jobs."""

from milvus_hubness.extras.ray.ray_gallery import RayBiases, RayGallery, Shard, fit_on_ray

fit = fit_on_ray
biases = RayBiases

__all__ = ["RayBiases", "RayGallery", "Shard", "biases", "fit", "fit_on_ray"]
