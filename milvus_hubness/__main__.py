"""python -m milvus_hubness"""

from milvus_hubness.cli import main

main()
