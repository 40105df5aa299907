"""Text to image: vectors shaped like CLIP's, the hubs among the images, and the effect of correction on them.

pip install ".[lite]"  # in a clone: nothing is on PyPI yet
python text_to_image.py [FILE.db or http://HOST:PORT]
"""

import sys
import tempfile
from collections import Counter

import numpy as np

from milvus_hubness import NNN, CorrectionConfig, HubnessClient, Recipe

IMAGES, DIM = 1000, 256


def clip_shaped_vectors():
    """Return captions (2000, 256) and images (1000, 256): caption i describes image i, the other captions no image.

    Captions and images have a direction each, the modality gap. Some images lean towards the captions: they are near to
    almost every caption, and become hubs. These vectors are made up; `milvus-hubness tune` measures the gain on yours.
    """
    rng = np.random.default_rng(0)
    meaning = rng.normal(size=(2 * IMAGES, DIM))
    caption_side, image_side = 20 * np.eye(DIM)[:2]
    captions = meaning + 2 * rng.normal(size=meaning.shape) + caption_side
    lean = 0.1 * np.abs(rng.normal(size=(IMAGES, 1)))
    images = (
        meaning[:IMAGES] + 2 * rng.normal(size=(IMAGES, DIM)) + image_side + lean * caption_side
    )
    return captions, images


def run(uri):
    captions, images = clip_shaped_vectors()
    queries, past_queries = captions[:IMAGES], captions[IMAGES:]

    # A collection that is corrected from its first row on.
    client = HubnessClient(uri)
    correction = CorrectionConfig(Recipe(past_queries, estimator=NNN(k=16, alpha=0.75)))
    client.create_collection(
        "images", DIM, metric_type="COSINE", hubness=correction, consistency_level="Strong"
    )
    client.insert("images", [{"id": i, "vector": image} for i, image in enumerate(images)])

    recalls = []
    for name, strength in ("raw", 0), ("corrected", 1):  # one collection answers both
        results = client.search("images", data=list(queries), limit=1, strength=strength)
        first = [hits[0]["id"] for hits in results]
        recalls.append(sum(i == image for i, image in enumerate(first)) / IMAGES)
        [(_, most)] = Counter(first).most_common(1)
        print(
            f"{name:9}  recall@1 {recalls[-1]:.1%}; one image is the first answer to {most} of {IMAGES} captions,"
        )
        print(f"           {IMAGES - len(set(first))} images are the first answer to none")
    return recalls


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        run(sys.argv[1] if len(sys.argv) > 1 else f"{folder}/images.db")
