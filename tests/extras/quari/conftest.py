import pytest
import torch

from milvus_hubness.extras.quari.model import Quari
from milvus_hubness.extras.quari.settings import QuariConfig

DIM = 12


def small(**changed):
    sizes = {"dim": DIM, "rank": 3, "width": 8, "layers": 2, "steps": 2, "heads": 2}
    sizes |= {"form": "published", "directions": DIM}
    return QuariConfig(**{**sizes, **changed})


@pytest.fixture
def disturbed():
    """A small network none of whose parts is at its start, as after a long training."""

    def make(**changed):
        with torch.random.fork_rng():
            torch.manual_seed(3)
            network = Quari(small(**changed)).eval()
            with torch.no_grad():
                for each in network.parameters():
                    each += 0.3 * torch.randn(each.shape)
        return network

    return make
