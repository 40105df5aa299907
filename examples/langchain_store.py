"""LangChain: HubnessMilvus takes the place of Milvus, for functions of Python's standard library and their docstrings.

pip install integrations/langchain ".[jobs,lite]"  # in a clone: nothing is on PyPI yet
python langchain_store.py [FILE.db or http://HOST:PORT]
"""

import random
import sys
import tempfile

from langchain_core.documents import Document
from langchain_core.embeddings import Embeddings
from langchain_milvus import Milvus
from sklearn.feature_extraction.text import HashingVectorizer

from langchain_milvus_hubness import HubnessMilvus
from milvus_hubness import Copy, migrate, plan_correction
from milvus_hubness.demo.run import Pair, collect

INDEX = {"index_type": "FLAT", "metric_type": "COSINE", "params": {}}


class HashedWords(Embeddings):
    """Word counts hashed into 512 dimensions: replace it by your embeddings."""

    def embed_documents(self, texts):
        vectorizer = HashingVectorizer(
            n_features=512, tokenizer=Pair.words, token_pattern=None, lowercase=False
        )
        return vectorizer.transform(texts).toarray().tolist()

    def embed_query(self, text):
        return self.embed_documents([text])[0]


def right_answers(store, pairs):
    """Return the number of docstrings whose function is the first answer."""
    retriever = store.as_retriever(search_kwargs={"k": 1})
    return sum(retriever.invoke(pair.docstring)[0].metadata["name"] == pair.name for pair in pairs)


def run(uri):
    pairs, embeddings = random.Random(0).sample(collect(), 1600), HashedWords()
    documents = [Document(pair.body, metadata={"name": pair.name}) for pair in pairs[:500]]
    plain = Milvus(embeddings, "functions", connection_args={"uri": uri}, index_params=INDEX)
    plain.add_documents(documents[:-1], ids=[str(i) for i in range(499)])
    before = right_answers(plain, pairs[:150])
    past_queries = embeddings.embed_documents([pair.docstring for pair in pairs[500:]])
    plan = plan_correction(uri, "functions", past_queries, Copy(alias="live"))
    migrate(uri, plan, no_writers=True)
    corrected = HubnessMilvus(embeddings, "live", connection_args={"uri": uri})
    after = right_answers(corrected, pairs[:150])
    print(f"right answers to 150 questions: {before} with Milvus, {after} with HubnessMilvus")
    corrected.add_documents(documents[-1:], ids=["499"])  # gets its bias from the bank
    print(
        f"added afterwards, and found: {corrected.similarity_search(pairs[499].body, k=1)[0].metadata['name']}"
    )
    return before, after


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        run(sys.argv[1] if len(sys.argv) > 1 else f"{folder}/functions.db")
